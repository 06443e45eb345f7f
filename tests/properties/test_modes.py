"""ALL_REDUCE == REDUCE_SCATTER == one process, for every function of ``fp.nn``: outputs and the gradients of inputs, weights
and biases, by the definition, the fast kernels and the overlapped ones, on both engines."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_par as fp
from functional_par import Mesh
from functional_par.capture import Capture
from functional_par.nn import (
    attention,
    column_linear,
    cross_entropy,
    embedding,
    gelu_mlp,
    layer_norm,
    linear_cross_entropy,
    rms_norm,
    row_linear,
    sequence_window,
    swiglu_mlp,
)
from functional_par.par import TensorParallelMode
from functional_par.run_par import RunPar

from ..nn.ranks import AR, RS, Owing, Placement, Same, Split, shared, stream, tensors, vjp
from .examples import few
from .inner import close

WAYS = [
    {"fast": False, "async_comm": False, "engine": "tape"},
    {"fast": True, "async_comm": True, "engine": "tape"},
    {"fast": True, "async_comm": False, "engine": "tape", "captured": True},
    {"fast": True, "async_comm": True, "engine": "func", "captured": True},
]


@dataclass(frozen=True)
class Case:
    """One function with drawn sizes.

    Attributes:
        split: ``(par, *local inputs) -> outputs``.
        plain: the same on whole inputs, in plain torch.
        inputs: shape of each whole input, and mode to how it lies.
        outputs: mode to how each output lies.
    """

    split: Callable[..., Any]
    plain: Callable[..., Any]
    inputs: Sequence[tuple[tuple[int, ...], Callable[[TensorParallelMode], Placement]]]
    outputs: Sequence[Callable[[TensorParallelMode], Placement]]


def cut(dim):
    return lambda mode: Split(dim)


def always(place):
    return lambda mode: place


class Sizes:
    """What every function draws, and from where it draws more: twenty examples from seeds differ in more than twenty that
    hypothesis varies."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tp = self.rng.choice([1, 2, 3, 4, 6])
        self.batch, self.embed = self.rng.randint(1, 3), self.rng.randint(1, 4)
        self.seq = self.times_tp(2)
        self.x = (self.batch, self.seq, self.embed), stream

    def times_tp(self, most: int = 3) -> int:
        return self.tp * self.rng.randint(1, most)

    def numbers(self, choices: Sequence[int]) -> Tensor:
        """One for each position, [batch, seq]."""
        return torch.tensor([self.rng.choices(choices, k=self.seq) for _ in range(self.batch)])


def column(s):
    """Several weights, split or whole, with and without bias, behind one entry."""
    out, kv, head = s.times_tp(), s.rng.randint(1, 3), s.rng.randint(1, 3)
    q_bias, k_bias = s.rng.random() < 0.5, s.rng.random() < 0.5

    def split(par, x, q, k, v, qb, kb):
        q, k, v = column_linear(x, (q, k, v), par, (qb if q_bias else None, kb if k_bias else None, None))
        return q + 0 * qb.sum(), (k + 0 * kb.sum())[None], v

    def plain(x, q, k, v, qb, kb):
        return (
            torch.einsum("bse,hde->bshd", x, q) + qb * q_bias,
            torch.stack([torch.einsum("bse,hde->bshd", x, k) + kb * k_bias] * s.tp),
            torch.einsum("bse,fe->bsf", x, v),
        )

    owing, e = always(Owing()), s.embed
    inputs = [
        s.x,
        ((out, head, e), cut(0)),
        ((kv, head, e), owing),
        ((out, e), cut(0)),
        ((out, head), cut(0)),
        ((kv, head), owing),
    ]
    return Case(split, plain, inputs, [cut(2), cut(0), cut(2)])


def row(s):
    """Heads and head contracted at once, and a bias that is added once."""
    heads, head = s.times_tp(), s.rng.randint(1, 3)
    return Case(
        lambda par, x, w, b: row_linear(x, w, par, b, n_in=2),
        lambda x, w, b: torch.einsum("bshd,ehd->bse", x, w) + b,
        [((s.batch, s.seq, heads, head), cut(2)), ((s.embed, heads, head), cut(1)), ((s.embed,), shared)],
        [stream],
    )


def look_up(s):
    """Any vocabulary, also smaller than tp, and ids on all borders."""
    vocab = s.rng.randint(1, 9)
    ids = s.numbers(range(vocab))
    return Case(
        lambda par, w: embedding(ids, w, par, vocab=vocab),
        lambda w: F.embedding(ids, w),
        [((vocab, s.embed), cut(0))],
        [stream],
    )


def entropy(s):
    """Any vocabulary, logits up to 1e4, some labels ignored, or all."""
    vocab = s.rng.randint(1, 9)
    scale = s.rng.choice([1.0, 1.0, 1e4])
    labels = s.numbers(s.rng.choice([[-100, *range(vocab)]] * 3 + [[-100]]))

    def plain(x):
        flat = F.cross_entropy(x.reshape(-1, vocab) * scale, labels.flatten(), reduction="none", ignore_index=-100)
        return flat.view(labels.shape)

    return Case(
        lambda par, x: cross_entropy(x * scale, labels, par, vocab=vocab),
        plain,
        [((s.batch, s.seq, vocab), cut(-1))],
        [always(Same())],
    )


def head(s):
    """The same from the stream on, with a weight in which rows may be padding."""
    vocab = s.rng.randint(1, 9)
    labels = s.numbers(s.rng.choice([[-100, *range(vocab)]] * 3 + [[-100]]))

    def plain(x, w):
        flat = F.cross_entropy(F.linear(x, w).flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
        return flat.view(labels.shape)

    return Case(
        lambda par, x, w: linear_cross_entropy(x, w, labels, par, vocab=vocab),
        plain,
        [s.x, ((vocab, s.embed), cut(0))],
        [always(Same())],
    )


def norms(s):
    """On the stream, whose windows share the weights."""

    def plain(x, w, lw, lb):
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w, scaled * lw + lb

    leaf = (s.embed,), shared
    return Case(
        lambda par, x, w, lw, lb: (rms_norm(x, w, par), layer_norm(x, lw, lb, par)),
        plain,
        [s.x, leaf, leaf, leaf],
        [stream, stream],
    )


def heads(s):
    """Every way in which tp and the groups of heads may meet."""
    kv = s.rng.randint(1, 6)
    n = math.lcm(kv, s.tp) * s.rng.randint(1, 2)
    head, causal = s.rng.randint(1, 3), s.rng.random() < 0.5
    where = always(Owing()) if kv % s.tp else cut(2)

    def plain(q, k, v):
        mask = (
            torch.ones(s.seq, s.seq, dtype=torch.bool).tril() if causal else torch.ones(s.seq, s.seq, dtype=torch.bool)
        )
        k, v = (x.repeat_interleave(n // kv, 2) for x in (k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(head)
        return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)

    shape = (s.batch, s.seq, kv, head), where
    return Case(
        lambda par, q, k, v: attention(q, k, v, par, n_heads=n, n_kv_heads=kv, causal=causal),
        plain,
        [((s.batch, s.seq, n, head), cut(2)), shape, shape],
        [cut(2)],
    )


def gelu(s):
    ffn, approximate = s.times_tp(), s.rng.choice(["tanh", "none"])

    def split(par, x, up, up_b, down, down_b):
        params = {"up": {"weight": up, "bias": up_b}, "down": {"weight": down, "bias": down_b}}
        return gelu_mlp(params, x, par, approximate=approximate)

    def plain(x, up, up_b, down, down_b):
        return F.linear(F.gelu(F.linear(x, up, up_b), approximate=approximate), down, down_b)

    e = s.embed
    inputs = [s.x, ((ffn, e), cut(0)), ((ffn,), cut(0)), ((e, ffn), cut(1)), ((e,), shared)]
    return Case(split, plain, inputs, [stream])


def swiglu(s):
    ffn, e = s.times_tp(), s.embed

    def split(par, x, gate, up, down):
        return swiglu_mlp({"gate": {"weight": gate}, "up": {"weight": up}, "down": {"weight": down}}, x, par)

    def plain(x, gate, up, down):
        g = F.linear(x, gate)
        return F.linear(g / (1 + torch.exp(-g)) * F.linear(x, up), down)

    return Case(split, plain, [s.x, ((ffn, e), cut(0)), ((ffn, e), cut(0)), ((e, ffn), cut(1))], [stream])


def positions(s):
    """Learned positions, cut as the stream is."""
    return Case(
        lambda par, v: sequence_window(v, par, 1),
        lambda v: v * 1,
        [((2, s.seq, s.embed), shared)],
        [stream],
    )


FUNCTIONS = [column, row, look_up, entropy, head, norms, heads, gelu, swiglu, positions]


@pytest.mark.parametrize("function", FUNCTIONS)
@few(20, 1.0)
@given(st.integers(0, 2**32))
def test_both_modes_and_every_kernel_equal_one_process(function, seed):
    sizes = Sizes(seed)
    case = function(sizes)
    wholes = tensors(*(shape for shape, _ in case.inputs))
    expected, grads = vjp(case.plain, wholes, cotangents)

    def main(world):
        return [one_way(case, world, mode, way, wholes, expected) for mode in (AR, RS) for way in WAYS]

    ranks = fp.run(main, Mesh(tp=sizes.tp), timeout=30.0)
    for i, (mode, way) in enumerate((mode, way) for mode in (AR, RS) for way in WAYS):
        outputs, pulled = zip(*(found[i] for found in ranks), strict=True)
        for j, (want, place) in enumerate(zip(expected, case.outputs, strict=True)):
            close(place(mode).collect([y[j] for y in outputs], want), want, f"output {j}, {mode.value}, {way}")
        for j, (want, (_, place)) in enumerate(zip(grads, case.inputs, strict=True)):
            found = place(mode).collect([g[j] for g in pulled], want)
            close(found, want, f"gradient of input {j}, {mode.value}, {way}")


def cotangents(outs: Sequence[Tensor]) -> list[Tensor]:
    """The same random numbers for outputs of the same shapes."""
    return tensors(*(y.shape for y in outs), seed=1)


def one_way(case, world, mode, way, wholes, expected):
    """Outputs and gradients of one rank, in one mode, by one kernel and engine."""
    rank, tp = world.rank, world.mesh.tp
    groups = {("tp",): world.group("tp")} if tp > 1 else {}
    par = RunPar(groups, mode, way["async_comm"], fast=way["fast"])
    local = [place(mode).put(x, rank, tp) for x, (_, place) in zip(wholes, case.inputs, strict=True)]
    before = [x.clone() for x in local]
    cts = [place(mode).put(ct, rank, tp) for ct, place in zip(cotangents(expected), case.outputs, strict=True)]
    if way.get("captured"):
        found = captured(case.split, par, local, lambda _: cts, way["engine"])
    else:
        found = vjp(lambda *primals: case.split(par, *primals), local, lambda _: cts, way["engine"])
    assert all(torch.equal(x, y) for x, y in zip(local, before, strict=True)), "an input was modified"
    return found


class Sum:
    """Adds up gradients by the place of the input."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        self.grads = {str(i): torch.full_like(x, torch.nan) for i, x in enumerate(like)}
        self.empty = set(self.grads)

    def add(self, grads: Mapping[str, Tensor]) -> None:
        for path, grad in grads.items():
            buffer, first = self.buffer(path)
            buffer.copy_(grad) if first else buffer.add_(grad)

    def buffer(self, path: str) -> tuple[Tensor, bool]:
        first = path in self.empty
        self.empty.discard(path)
        return self.grads[path], first


def captured(function, par, local, cts, engine):
    """As the step runs a layer: all inputs but the first, if there are others, are leaves of the model."""
    n = min(len(local) - 1, 1)
    capture, gradients = Capture({str(i): x for i, x in enumerate(local) if i >= n}), Sum(local)
    inside = par.within("layer", capture)

    def layer(*primals):
        given = capture.watched(primals[-1])
        with capture.forward(given, primals[-1]):
            return function(inside, *primals[:n], *given.values())

    with capture.backward(gradients, None):
        outputs, pulled = vjp(layer, [*local[:n], torch.zeros((), dtype=torch.float64)], cts, engine)
    gradients.add({**{str(i): pulled[i] for i in range(n)}, **capture.ordinary})
    return outputs, [torch.zeros_like(x) if i in gradients.empty else x for i, x in gradients.grads.items()]
