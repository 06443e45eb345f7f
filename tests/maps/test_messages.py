"""What is said of maps that combine blocks with themselves."""

import re

import pytest
import torch

import functional_par as fp
from tests.toys import odd


def outer(grad, leaf):
    rows = grad.sum(1)
    return grad * (rows[:, None] * rows[None, :]).sum()


def ordered_by_its_own(grad, leaf):
    return grad.index_select(1, (0 * grad.sum(1)).to(torch.int64))


def mean_of_a_block(grad, leaf):
    return grad - grad.mean(0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (outer, "mul of values that are cut along the same axis in different dims. Transpose one of them."),
        (ordered_by_its_own, "index_select by indices that are cut along tp in dim 0. Make them whole first."),
        (mean_of_a_block, "Take leaf.psum(x.sum(0), 'tp') and divide it by the size in leaf.shape."),
    ],
    ids=lambda value: getattr(value, "__name__", "message"),
)
def test_a_map_that_mixes_blocks_is_told_what_to_write(function, message):
    with pytest.raises(fp.MissingCollective, match=re.escape(message)):
        fp.compose(fp.on_reduced_gradients(function, "mlp.up"), fp.shard_tp(), fp.dp_reduce())(odd())
