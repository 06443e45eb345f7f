from __future__ import annotations

import re
import sys

import pytest
import torch

from functional_par.errors import DataError, ModelError
from functional_par.nn import embedding
from functional_par.run_par import RunPar

from .ranks import AR, RS, calls, on_ranks


@pytest.mark.parametrize(("mode", "expected"), [(AR, {"all_reduce": 1}), (RS, {"reduce_scatter": 1})])
def test_a_look_up_makes_one_call(mode, expected):
    def main(par, rank):
        embedding(torch.tensor([[1, 2]]), torch.zeros(2, 3), par, vocab=4)
        return calls(par)

    assert on_ranks(2, main, mode) == [expected] * 2


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("bad", [-1, 97, 98, 1000])
def test_an_id_outside_the_vocabulary_is_an_error_for_every_tp(tp, bad):
    ids = torch.tensor([[0, 96], [bad, 3]])
    message = f"token id {bad} at [1, 0] is outside the vocabulary: vocab=97 allows 0 to 96."
    with pytest.raises(DataError, match=re.escape(message)):
        on_ranks(tp, lambda par, rank: embedding(ids, torch.zeros(-(-97 // tp), 2), par, vocab=97))


@pytest.mark.parametrize("tp", [1, 2])
def test_where_ids_are_not_looked_at_an_id_outside_gives_not_a_number(tp, monkeypatch):
    monkeypatch.setattr(sys.modules["functional_par.nn.embedding"], "check_range", lambda *_: None)
    ids = torch.tensor([[4, 5]])

    def main(par, rank):
        return embedding(ids, torch.ones(-(-5 // tp), 2), par, vocab=5)

    for x in on_ranks(tp, main, fast=False):
        assert x[0, 0].eq(1).all()
        assert x[0, 1].isnan().all()


def test_what_does_not_fit_is_an_error_that_names_it():
    with pytest.raises(ModelError, match=re.escape("embedding: ids are torch.float32; give integers.")):
        embedding(torch.zeros(1, 2), torch.zeros(4, 2), RunPar(), vocab=4)
    message = "embedding: vocab=5 over tp=1 is 5 entries a rank (padded), but this rank has 4."
    with pytest.raises(ModelError, match=re.escape(message)):
        embedding(torch.tensor([[1]]), torch.zeros(4, 2), RunPar(), vocab=5)
    with pytest.raises(
        ModelError, match=re.escape("a sequence of 3 positions cannot be split over tp=2: 3 = 1 * 2 + 1.")
    ):
        on_ranks(2, lambda par, r: embedding(torch.tensor([[1, 2, 3]]), torch.zeros(2, 2), par, vocab=4), RS)


def test_without_tokens_there_is_nothing_to_check():
    assert embedding(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(4, 2), RunPar(), vocab=4).shape == (0, 3, 2)
