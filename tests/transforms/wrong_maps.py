"""Maps on gradients with one mistake each, and what the message says: where it acts, the error, words of it."""

from __future__ import annotations

import torch

import functional_par as fp
from functional_par import MeshError, MissingCollective, ModelError, SuperfluousCollective


def clip(grad, leaf):
    norm = grad.norm()
    return grad / norm.clamp(min=1.0)


def rounds(grad, leaf):
    return (grad * 100).to(torch.int32).to(grad.dtype) / 100


def adds_once_a_rank(grad, leaf):
    return grad + leaf.param


def squares(grad, leaf):
    return grad * grad


def inverse(grad, leaf):
    return 1.0 / grad


def sums_twice(grad, leaf):
    grad = leaf.psum(grad, *leaf.owes)
    return leaf.psum(grad, "dp")


def sums_what_is_cut(grad, leaf):
    return leaf.psum(grad, "tp")


def sums_over_no_axis(grad, leaf):
    return leaf.psum(grad, "model")


def mean_of_a_block(grad, leaf):
    return grad - grad.mean(0)


def norm_of_a_block(grad, leaf):
    return grad / grad.norm()


def smallest_of_a_block(grad, leaf):
    return grad - grad.amin()


def largest_of_a_block(grad, leaf):
    return grad - grad.amax(0)


def largest_of_terms(grad, leaf):
    return grad * leaf.amax(grad)


def sorts_a_block(grad, leaf):
    return grad.sort(0)[0]


def block_with_whole(grad, leaf):
    return grad * torch.arange(grad.shape[0])[:, None]


def block_by_whole(grad, leaf):
    return leaf.normal(grad.shape[0], grad.shape[0]) @ grad


def block_with_its_transpose(grad, leaf):
    square = grad @ grad.T
    return square @ grad


def mixed(grad, leaf):
    return grad[:, :4] + grad[:4, :4].T


def terms_by_blocks(grad, leaf):
    total = grad.sum()  # a partial sum over tp too
    return total * grad


def sum_left_over(grad, leaf):
    return torch.ones_like(grad) * grad.sum()


def cut_otherwise(grad, leaf):
    return leaf.all_gather(grad, "tp", 0)[: grad.shape[0]]


def gathers_what_is_whole(grad, leaf):
    return leaf.all_gather(grad, "tp", 1)


def in_place(grad, leaf):
    return grad.mul_(0.5)


def draws(grad, leaf):
    return grad * torch.rand(())


def branches(grad, leaf):
    return grad if leaf.param.sum().item() > 0 else -grad


def other_shape(grad, leaf):
    return grad.sum(1)


def other_dtype(grad, leaf):
    return grad.to(torch.bfloat16)


def nothing(grad, leaf):
    return None


def of_a_number(grad, leaf):
    return grad * leaf.psum(1.0, "dp")


def of_another_shape(grad, leaf):
    return leaf.approximate(grad, lambda x: x[:1])


def fails(grad, leaf):
    return grad @ torch.ones(1000)


LOCAL, REDUCED = fp.on_local_gradients, fp.on_reduced_gradients

WRONG = {
    clip: (LOCAL, MissingCollective, "linalg_vector_norm of a partial sum over ep, dp. It is not linear"),
    rounds: (LOCAL, MissingCollective, "_to_copy, to torch.int32, of a partial sum over ep, dp."),
    adds_once_a_rank: (
        LOCAL,
        MissingCollective,
        "add of a partial sum over ep, dp and a value that is not one: the sum",
    ),
    squares: (LOCAL, MissingCollective, "mul of two partial sums over ep, dp: a product of terms is not a term of the"),
    inverse: (LOCAL, MissingCollective, "reciprocal of a partial sum over ep, dp."),
    sums_twice: (
        LOCAL,
        SuperfluousCollective,
        "leaf.psum over dp of a value that is cut along tp in dim 0: nobody owes",
    ),
    sums_what_is_cut: (LOCAL, SuperfluousCollective, "leaf.psum over tp of a value that is cut along tp: it would add"),
    sums_over_no_axis: (LOCAL, MeshError, "a sum over 'model': the axes are ep, pp, dp, cp, tp."),
    mean_of_a_block: (
        LOCAL,
        MissingCollective,
        "mean over dim 0, of which every rank of tp has a block: each would get",
    ),
    norm_of_a_block: (REDUCED, MissingCollective, "leaf.norm(x) is the norm of the whole"),
    smallest_of_a_block: (REDUCED, MissingCollective, "-leaf.amax(-x) is the smallest entry of the whole."),
    largest_of_a_block: (REDUCED, MissingCollective, "leaf.amax(x) is the largest entry of the whole."),
    largest_of_terms: (LOCAL, MissingCollective, "leaf.amax of a partial sum over ep, dp."),
    sorts_a_block: (REDUCED, MissingCollective, "sort of a value that is cut along tp: its result would depend on how"),
    block_with_whole: (LOCAL, MissingCollective, "mul of a value that is cut along tp in dim 0 and one that is not"),
    block_by_whole: (LOCAL, MissingCollective, "mm over a dim of which one factor has a block along tp, the other all"),
    block_with_its_transpose: (
        REDUCED,
        MissingCollective,
        "mm of two values that are cut along the same axis in different",
    ),
    mixed: (REDUCED, MissingCollective, "slice of a value that is cut along tp in dim 0 mixes its blocks"),
    terms_by_blocks: (REDUCED, MissingCollective, "mul of a partial sum over tp and a value that is cut along it."),
    sum_left_over: (REDUCED, MissingCollective, "mul of a partial sum over tp and a value that is cut along it."),
    cut_otherwise: (
        REDUCED,
        ModelError,
        "it returns a value that is whole on every rank for a leaf that is cut along tp in dim 0",
    ),
    gathers_what_is_whole: (
        REDUCED,
        SuperfluousCollective,
        "leaf.all_gather over tp of dim 1 of a value that is cut along tp in",
    ),
    in_place: (REDUCED, ModelError, "mul_ changes a tensor in place. Maps are pure functions: use a new name"),
    draws: (REDUCED, ModelError, "rand draws from torch's global generator, so the ranks would differ."),
    branches: (
        REDUCED,
        ModelError,
        "The function runs on tensors without data: no Python number may be taken from one",
    ),
    other_shape: (REDUCED, ModelError, "it returns torch.float32[8] for a shard of torch.float32[8, 6]."),
    other_dtype: (LOCAL, ModelError, "it returns torch.bfloat16[8, 6] for a shard of torch.float32[8, 6]."),
    nothing: (LOCAL, ModelError, "it returns NoneType for a shard of torch.float32[8, 6]."),
    of_a_number: (LOCAL, ModelError, "leaf.psum of float; give a tensor."),
    of_another_shape: (LOCAL, ModelError, "leaf.approximate: the approximation of a tensor of shape [8, 6] is [1, 6]"),
    fails: (LOCAL, ModelError, "it failed while it was followed: RuntimeError: "),
}


def by_the_size_of_a_shard(grad, leaf):
    return grad / grad.numel() ** 0.5


def by_the_length_of_a_shard(grad, leaf):
    return grad * (1.0 / grad.shape[0])


def by_ones_of_a_shard(grad, leaf):
    return grad * torch.ones(grad.shape).sum()


def by_noise_of_a_shard(grad, leaf):
    return grad * leaf.normal(*grad.shape).norm()


def branches_on_a_size(grad, leaf):
    return grad if grad.shape[0] > 7 else grad * 2


def branches_in_the_end(grad, leaf):
    return grad.neg() if grad.shape[0] > 7 else grad


def rows_taken_apart(grad, leaf):
    other = grad.reshape(grad.shape[1], grad.shape[0])
    return (other * other.norm(dim=1, keepdim=True)).reshape(grad.shape)


def rolls_all(grad, leaf):
    return grad.roll(1)


def sums_as_integers(grad, leaf):
    return grad - (grad * 100).sum(1, keepdim=True, dtype=torch.int64).to(grad.dtype)


def reads_bits(grad, leaf):
    return grad.view(torch.int32).neg().view(torch.float32)


def looks_up_by_block(grad, leaf):
    table = leaf.normal(2).index_select(0, (leaf.param.sum(1) > 0).long())
    return grad * table.sum()


def slices_a_block(grad, leaf):
    return leaf.slice(grad, "tp", 0)


def slices_another_dim(grad, leaf):
    return leaf.slice(leaf.normal(*leaf.shape), "tp", 1)


SIZED = {
    by_the_size_of_a_shard: (REDUCED, "div with other=4.898979485566356, a number that depends on how the leaf is cut"),
    by_the_length_of_a_shard: (
        LOCAL,
        "mul with other=0.25, a number that depends on how the leaf is cut: for the whole",
    ),
    by_ones_of_a_shard: (
        REDUCED,
        "ones gives a tensor that is whole on every rank, of shape [4, 6], but [8, 6] for the",
    ),
    by_noise_of_a_shard: (
        REDUCED,
        "leaf.normal gives a tensor that is whole on every rank, of shape [4, 6], but [8, 6]",
    ),
    branches_on_a_size: (REDUCED, "it does another thing (mul) on the shard of a leaf than on the whole (nothing)"),
    branches_in_the_end: (REDUCED, "it does another thing (nothing) on the shard of a leaf than on the whole (neg)"),
    rows_taken_apart: (
        REDUCED,
        "view gives a tensor that is cut along tp in dim 0, of shape [6, 4], but [6, 8] for the",
    ),
    rolls_all: (REDUCED, "roll of a value that is cut along tp in dim 0 mixes its blocks"),
    sums_as_integers: (LOCAL, "sum, to torch.int64, of a partial sum over ep, dp. It is not linear"),
    reads_bits: (LOCAL, "view, to torch.int32, of a partial sum over ep, dp. It is not linear"),
    looks_up_by_block: (REDUCED, "index_select by indices that are cut along tp in dim 0. Make them whole first."),
    slices_a_block: (
        REDUCED,
        "leaf.slice over tp of a value that is cut along tp in dim 0, for a leaf that is ffn@tp embed",
    ),
    slices_another_dim: (REDUCED, "leaf.slice over tp of dim 1 of a tensor of shape [8, 6]: the leaf has 8 there"),
}
