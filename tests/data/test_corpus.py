"""A corpus holds ids that are all in the vocabulary, and knows their entropy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_par.data import Corpus, corpus
from functional_par.errors import DataError


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=200), st.sampled_from(["u1", "i8", "<u4"]))
def test_unigram_entropy_is_the_entropy_of_the_frequencies(ids, dtype):
    shares = [ids.count(i) / len(ids) for i in set(ids)]
    expected = -math.fsum(share * math.log(share) for share in shares)
    assert Corpus(np.array(ids, dtype=dtype), vocab=10).unigram_entropy() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_entropy_takes_no_memory_for_ids_that_do_not_occur(monkeypatch, chunk):
    monkeypatch.setattr(corpus, "_CHUNK", chunk)
    few = Corpus(np.array([0, 5, 2**40, 5]), vocab=2**50)
    assert few.unigram_entropy() == pytest.approx(1.5 * math.log(2), abs=1e-12)


def test_torch_tensors_are_taken():
    tokens = Corpus(torch.tensor([1, 2, 3]), vocab=4)
    assert len(tokens) == 3
    assert tokens.tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize("chunk", [1, 3, 1 << 22])
@pytest.mark.parametrize(("ids", "wrong", "at"), [([0, 1, 2, 9, 8], 8, 4), ([0, 1, 2, 3, -1, 99], -1, 4)])
def test_an_id_outside_the_vocabulary_is_named_with_its_place(monkeypatch, chunk, ids, wrong, at):
    monkeypatch.setattr(corpus, "_CHUNK", chunk)
    ids = [i if i != 9 else 3 for i in ids]
    message = rf"mine: token id {wrong} at position {at} is outside the vocabulary of 4 \(ids 0 to 3\)"
    with pytest.raises(DataError, match=message):
        Corpus(np.array(ids), vocab=4, name="mine")


@pytest.mark.parametrize(
    ("tokens", "vocab", "message"),
    [
        (np.array([], dtype=np.uint8), 256, r"corpus is empty"),
        (np.zeros((2, 2), dtype=np.uint8), 256, r"shape \(2, 2\) and dtype uint8; one dimension of integers"),
        (np.zeros(3), 256, r"dtype float64; one dimension of integers"),
        ([1, 2], 4, r"corpus: tokens are a list; give a numpy array or a tensor of integers"),
        ("text", 256, r"corpus: tokens are a str"),
        (None, 256, r"corpus: tokens are a NoneType"),
        (torch.zeros(3, dtype=torch.bfloat16), 4, r"this tensor \(torch\.bfloat16, cpu\) cannot be read"),
        (torch.zeros(3, dtype=torch.int64, device="meta"), 4, r"this tensor \(torch\.int64, meta\) cannot be read"),
        (np.zeros(3, dtype=np.uint8), 0, r"vocab = 0: an integer of at least 1"),
        (np.zeros(3, dtype=np.uint8), 2.0, r"vocab = 2\.0: an integer"),
    ],
)
def test_what_is_no_row_of_ids_is_refused(tokens, vocab, message):
    with pytest.raises(DataError, match=message):
        Corpus(tokens, vocab)
