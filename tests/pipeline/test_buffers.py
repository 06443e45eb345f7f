"""Memory that is received into, again and again."""

from __future__ import annotations

import math

import pytest
import torch

from functional_par.pipeline.buffers import Buffers, garbage
from functional_par.trace import Abstract

CPU = torch.device("cpu")


def test_memory_that_was_given_back_is_used_again_by_shape_and_dtype():
    buffers = Buffers(CPU, poison=False)
    like, other = Abstract((2, 3), torch.float32), Abstract((2, 3), torch.float64)
    first = buffers.take(like)
    assert (first.shape, first.dtype) == ((2, 3), torch.float32)
    second = buffers.take(like)
    assert second.data_ptr() != first.data_ptr()
    buffers.give_back([first])
    assert buffers.take(other).dtype == torch.float64
    assert buffers.take(like).data_ptr() == first.data_ptr()
    assert buffers.made == 3


def test_what_lies_in_a_buffer_is_copied_before_it_is_sent_on_and_nothing_else_is():
    buffers = Buffers(CPU, poison=False)
    x = buffers.take(Abstract((4, 4), torch.float32)).fill_(1.0)
    for alias in (x, x.view(16), x[1:], x.t(), x.detach()):
        owned = buffers.owned(alias)
        assert owned.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        assert torch.equal(owned, alias)
    y = torch.ones(4)
    assert buffers.owned(y) is y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_poison_is_there_before_a_value_and_after_it(dtype):
    buffers = Buffers(CPU, poison=True)
    like = Abstract((3,), dtype)
    expected = torch.full((3,), garbage(dtype), dtype=dtype)
    x = buffers.take(like)
    torch.testing.assert_close(x, expected, equal_nan=True)
    x.zero_()
    buffers.give_back([x])
    torch.testing.assert_close(x, expected, equal_nan=True)


def test_a_stand_in_has_a_shape_but_no_memory_and_no_value():
    x = Buffers(CPU, poison=False).stand_in(Abstract((100, 200), torch.float32))
    assert x.shape == (100, 200)
    assert x.untyped_storage().nbytes() == 4
    assert math.isnan(x[7, 3].item())
