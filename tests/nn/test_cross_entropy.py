from __future__ import annotations

import re
import sys

import pytest
import torch
import torch.nn.functional as F

from functional_par.errors import DataError, ModelError
from functional_par.nn import cross_entropy
from functional_par.run_par import RunPar

from .ranks import Split, calls, close, on_ranks, tensors, vjp


def plain(labels, vocab):
    return lambda x: F.cross_entropy(x.reshape(-1, vocab), labels.reshape(-1), reduction="none").view(labels.shape)


def labels_of(vocab, kind):
    """[2, 8] labels: on all borders between shards, some ignored, or all."""
    borders = [0, vocab - 1]
    for tp in (2, 3, 4):
        size = -(-vocab // tp)
        borders += [i for r in range(1, tp) for i in (r * size - 1, r * size) if i < vocab]
    labels = torch.tensor((borders * 16)[:16]).view(2, 8)
    if kind == "some ignored":
        labels[0, ::3] = -100
    if kind == "all ignored":
        labels[:] = -100
    return labels


@pytest.mark.parametrize("fast", [False, True])
def test_padding_counts_for_nothing_whatever_it_holds(fast):
    (logits,) = tensors((1, 3, 5))
    labels = torch.tensor([[0, 3, 4]])

    def main(par, rank):
        local = Split(-1).put(logits, rank, 4)
        if rank == 2:
            local[..., 1:] = 1e6
        if rank == 3:
            local[:] = torch.inf
        y, (grad,) = vjp(lambda x: cross_entropy(x, labels, par, vocab=5), [local], lambda _: tensors((1, 3)))
        return y[0], grad

    for rank, (loss, grad) in enumerate(on_ranks(4, main, fast=fast)):
        close(loss, plain(labels, 5)(logits))
        if rank == 2:
            assert not grad[..., 1:].any()
        if rank == 3:
            assert not grad.any()


@pytest.mark.parametrize("fast", [False, True])
def test_ignored_labels_give_exactly_zero_even_where_the_logits_are_huge(fast):
    logits = torch.tensor([[[1e4, -1e4, 0.0], [1e4, 1e4, 1e4]]])
    labels = torch.tensor([[-100, 2]])
    par = RunPar(fast=fast)
    y, (grad,) = vjp(lambda x: cross_entropy(x, labels, par, vocab=3), [logits], lambda _: [torch.ones(1, 2)])
    assert y[0][0, 0] == 0
    assert not grad[0, 0].any()
    assert y[0][0, 1].item() == pytest.approx(1.0986123)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    ("dtype", "result"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_the_loss_is_float32_or_better_and_the_gradient_has_the_dtype_of_the_logits(fast, dtype, result):
    logits = tensors((2, 8, 97))[0].to(dtype)
    labels = labels_of(97, "some ignored")
    ct = tensors((2, 8), seed=1)[0].to(result)
    par = RunPar(fast=fast)
    y, (grad,) = vjp(lambda x: cross_entropy(x, labels, par, vocab=97), [logits], lambda _: [ct])
    assert (y[0].dtype, grad.dtype) == (result, dtype)
    expected, (expected_grad,) = vjp(plain(labels, 97), [logits.to(result)], lambda _: [ct])
    close(y[0], expected[0], 1e-6)
    close(grad, expected_grad.to(dtype), torch.finfo(dtype).eps * 2)


def test_forward_makes_two_calls_and_backward_none():
    (logits,) = tensors((2, 8, 8))
    labels = labels_of(16, "all")

    def main(par, rank):
        counts = []

        def cotangents(outs):
            counts.append(calls(par))
            return outs

        vjp(lambda x: cross_entropy(x, labels, par, vocab=16), [logits], cotangents)
        return [*counts, calls(par)]

    assert on_ranks(2, main) == [[{"all_reduce": 2}, {}]] * 2
    assert on_ranks(2, main, fast=False) == [[{"all_reduce": 2}, {}]] * 2


def test_the_fast_kernel_keeps_one_tensor_of_the_size_of_the_logits():
    logits = torch.randn(2, 8, 97, requires_grad=True)
    kept = []

    def pack(x):
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        cross_entropy(logits * 1, labels_of(97, "all"), RunPar(), vocab=97)
    assert sum(x.numel() >= logits.numel() for x in kept) == 1


def test_many_rows_are_done_in_blocks():
    (logits,) = tensors((2, 800, 97))
    labels = torch.arange(1600).view(2, 800) % 97
    close(cross_entropy(logits, labels, RunPar(), vocab=97), plain(labels, 97)(logits))


def test_another_label_may_be_the_ignored_one():
    (logits,) = tensors((1, 2, 5))
    loss = cross_entropy(logits, torch.tensor([[0, 1]]), RunPar(), vocab=5, ignore_index=0)
    assert loss[0, 0] == 0
    assert loss[0, 1] > 0


def test_a_pullback_gives_the_same_bits_twice():
    (logits,) = tensors((2, 8, 97))
    labels = labels_of(97, "all")
    y, pull = torch.func.vjp(lambda x: cross_entropy(x, labels, RunPar(), vocab=97), logits)
    first = pull(y)[0].clone()
    assert torch.equal(pull(y)[0], first)


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("fast", [False, True])
def test_second_derivatives_are_right(fast, tp):
    logits, weights, direction = tensors((1, 4, 5), (1, 4), (1, 4, 5))
    labels = torch.tensor([[0, -100, 4, 1]])

    def total(loss):
        return lambda x: (loss(x).square() * weights).sum()

    expected = torch.func.grad(lambda x: (torch.func.grad(total(plain(labels, 5)))(x) * direction).sum())(logits)

    def main(par, rank):
        gradient = torch.func.grad(total(lambda x: cross_entropy(x, labels, par, vocab=5)))
        local = Split(-1).put(direction, rank, tp)
        return torch.func.grad(lambda x: (gradient(x) * local).sum())(Split(-1).put(logits, rank, tp))

    close(Split(-1).collect(on_ranks(tp, main, fast=fast), logits), expected)


def test_second_derivatives_are_right_on_a_tape():
    (logits,) = tensors((1, 4, 5))
    labels = torch.tensor([[0, 3, 4, 1]])

    def slope(loss):
        x = logits.clone().requires_grad_()
        (grad,) = torch.autograd.grad(loss(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.pow(3).sum(), x)[0]

    close(slope(lambda x: cross_entropy(x, labels, RunPar(), vocab=5)), slope(plain(labels, 5)))


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("bad", [-1, 97, -99])
def test_a_label_out_of_range_is_an_error_for_every_tp(tp, bad):
    labels = torch.tensor([[0, bad, -100]])
    message = (
        f"label {bad} at [0, 1] is outside the vocabulary: vocab=97 allows 0 to 96, or -100 to ignore the position."
    )
    with pytest.raises(DataError, match=re.escape(message)):
        on_ranks(tp, lambda par, r: cross_entropy(torch.zeros(1, 3, -(-97 // tp)), labels, par, vocab=97))


@pytest.mark.parametrize("fast", [False, True])
def test_where_labels_are_not_looked_at_one_out_of_range_gives_not_a_number(fast, monkeypatch):
    monkeypatch.setattr(sys.modules["functional_par.nn.cross_entropy"], "check_range", lambda *_: None)
    loss = cross_entropy(torch.zeros(1, 3, 5), torch.tensor([[0, 5, -1]]), RunPar(fast=fast), vocab=5)
    assert loss.isnan().tolist() == [[False, True, True]]


def test_shapes_that_do_not_fit_are_errors_that_name_them():
    message = "cross_entropy: logits [1, 2, 5] take labels of [1, 2], not [1, 3]."
    with pytest.raises(ModelError, match=re.escape(message)):
        cross_entropy(torch.zeros(1, 2, 5), torch.zeros(1, 3, dtype=torch.int64), RunPar(), vocab=5)
    message = "cross_entropy: vocab=9 over tp=1 is 9 entries a rank (padded), but this rank has 5."
    with pytest.raises(ModelError, match=re.escape(message)):
        cross_entropy(torch.zeros(1, 2, 5), torch.zeros(1, 2, dtype=torch.int64), RunPar(), vocab=9)
