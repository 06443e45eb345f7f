from __future__ import annotations

import re

import pytest

from functional_par.errors import ModelError
from functional_par.nn import sequence_window

from .ranks import RS, calls, on_ranks, tensors


def test_taking_a_window_makes_no_call():
    (v,) = tensors((12, 3))

    def main(par, rank):
        sequence_window(v, par, 0)
        return calls(par)

    assert on_ranks(3, main, RS) == [{}] * 3


def test_an_uneven_sequence_is_an_error_with_the_numbers():
    message = "a sequence of 12 positions cannot be split over tp=5: 12 = 2 * 5 + 2."
    with pytest.raises(ModelError, match=re.escape(message)):
        on_ranks(5, lambda par, rank: sequence_window(tensors((12, 3))[0], par, 0), RS)
