"""Random straight-line models that nothing makes right: any operation on any values so far, any collective with any type.

A program is data (layers of operations that name earlier values), so that the same program runs in the trace, on ranks and
as one joint function. Operations fit whatever shapes they get, so that a program always runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import functional_par as fp
from functional_par.model import Model
from tests.trace.harness import FIELDS, param

EMBED = 6

LEAVES: dict[str, Callable[[], fp.Param]] = {
    "g": lambda: param(EMBED),
    "m": lambda: param(EMBED, EMBED),
    "s": lambda: param(EMBED, dims="ffn"),
    "up": lambda: param(EMBED, EMBED, dims="ffn embed"),
    "down": lambda: param(EMBED, EMBED, dims="embed ffn"),
    "t": lambda: param(5, EMBED, dims="rows embed"),
    "v": lambda: param(5, EMBED, dims="vocab embed"),
    "f": lambda: param(EMBED, trainable=False),
    "z": lambda: param(EMBED, dims="ffn", trainable=False),
}
"""The leaves of each layer: whole vectors, matrices and tables, cut ones, and frozen ones of both kinds."""

CUT = {"s", "up", "down", "v", "z"}
FROZEN = {"f", "z"}


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        kind: a key of ``OPERATIONS``.
        args: positions of the values it takes.
        leaf: name of the leaf it reads, or "".
        axes: of a collective.
        numbers: dims, a type, a rank.
        anchor: axes over which the result has to be varied, or summed if it is tp, before it may enter the loss; None if it
            is no activation. See ``model_of``.
    """

    kind: str
    args: tuple[int, ...] = ()
    leaf: str = ""
    axes: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    anchor: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Block:
    """One layer: operations, the positions of the values it returns, and where its leaves are (name to path)."""

    ops: tuple[Op, ...]
    returns: tuple[int, ...]
    reads: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Program:
    """Layers and a loss, which is one more block; each leaves values to the next as a dict."""

    blocks: tuple[Block, ...]

    def paths(self) -> set[str]:
        return {path for block in self.blocks for _, path in block.reads}


@dataclass
class Anchors:
    """Further uses of the activations on the way, which the loss of one rank adds up. A wrong cotangent then shows.

    Attributes:
        whole_only: leave out activations that differ along tp.
        terms: what this call of the model has found so far.
    """

    whole_only: bool = False
    terms: list[Tensor] = field(default_factory=list)

    def use(self, y: Tensor, axes: tuple[str, ...], par: Any) -> None:
        if "tp" in axes and self.whole_only:
            return
        y = (y * ramp(y)).sum() * 0.3
        y = par.psum(y, "tp") if "tp" in axes else y
        data = [axis for axis in axes if axis != "tp"]
        self.terms.append(par.pvary(y, *data) if data else y)


def model_of(program: Program, anchors: Anchors | None = None) -> Model:
    """The program as a model.

    Args:
        program: what to compute.
        anchors: of the rank that will call the model once; None for the program as it is.
    """
    tree: dict[str, Any] = {}
    for path in sorted(program.paths()):
        at, name = path.split(".")
        tree.setdefault(at, {})[name] = LEAVES[name]()
    layers = [(f"layer{i}", dict(b.reads), layer_of(b, anchors)) for i, b in enumerate(program.blocks[:-1])]
    last = program.blocks[-1]
    return Model(tree, layers, (dict(last.reads), loss_of(last, anchors)), FIELDS)


def layer_of(block: Block, anchors: Anchors | None) -> Callable[..., Any]:
    def layer(p: Any, x: Any, par: Any) -> dict[str, Tensor]:
        values = run(block, p, x, par, anchors)
        return {f"v{i}": values[at] for i, at in enumerate(block.returns)}

    return layer


def loss_of(block: Block, anchors: Anchors | None) -> Callable[..., Any]:
    def loss(p: Any, x: Any, par: Any) -> tuple[Tensor, int]:
        values = run(block, p, x, par, anchors)
        total = values[block.returns[0]].sum()
        for term in anchors.terms if anchors else ():
            total = total + term
        return total, len(par.batch["x"])

    return loss


def run(block: Block, p: Any, x: Any, par: Any, anchors: Anchors | None) -> list[Tensor]:
    """All values of a block, those that enter it first."""
    values = [x[key] for key in sorted(x) if key.startswith("v")]
    for op in block.ops:
        y = OPERATIONS[op.kind](op, [values[i] for i in op.args], p, par)
        values.append(y)
        if anchors is not None and op.anchor is not None:
            anchors.use(y, op.anchor, par)
    return values


def ramp(x: Tensor) -> Tensor:
    """Numbers that tell every element of ``x`` from every other."""
    return torch.linspace(-1.0, 1.3, x.numel(), dtype=x.dtype, device=x.device).reshape(x.shape)


def fitted(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The elements of ``x`` in another shape: repeated in a cycle, or the first of them."""
    if tuple(x.shape) == tuple(shape):
        return x
    n = 1
    for size in shape:
        n *= size
    flat = x.reshape(-1)
    return flat.repeat(-(-n // flat.numel()))[:n].reshape(shape)


def with_last(x: Tensor, size: int) -> Tensor:
    x = x.reshape(1) if x.ndim == 0 else x
    return x.repeat(*(1,) * (x.ndim - 1), -(-size // x.shape[-1])).narrow(-1, 0, size)


def divisible(x: Tensor, dim: int, n: int) -> Tensor:
    """``x`` so long in one dim that ``n`` ranks divide it."""
    size = x.shape[dim]
    if size < n:
        return torch.cat([x] * n, dim).narrow(dim, 0, n)
    return x.narrow(dim, 0, size - size % n)


def bounded(x: Tensor, dim: int) -> Tensor:
    return x.narrow(dim, 0, min(x.shape[dim], 12))


def at_least(x: Tensor, ndim: int) -> Tensor:
    while x.ndim < ndim:
        x = x.unsqueeze(-1)
    return x


OPERATIONS: dict[str, Callable[[Op, list[Tensor], Any, Any], Tensor]] = {}


def operation(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    OPERATIONS[fn.__name__] = fn
    return fn


# Sources


@operation
def batch(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    return par.batch["x"] * 0.5


@operation
def rows(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    return torch.sin(par.rows.to(torch.float64) + 1)


@operation
def leaf(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    return p[op.leaf] * 1.1


# Elementwise


@operation
def tanh(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    return torch.tanh(xs[0] * 0.4)


@operation
def sine(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    return torch.sin(xs[0] + 0.7)


@operation
def add(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    return xs[0] + 0.7 * fitted(xs[1], xs[0].shape)


@operation
def multiply(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    return torch.sin(xs[0] + 0.2) * (1.1 + fitted(xs[1], xs[0].shape))


@operation
def choose(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    a, b = xs[0], fitted(xs[1], xs[0].shape)
    return torch.where(ramp(a) > 0, a + 0.1, b * 1.2)


@operation
def compare(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    a, b = xs[0], fitted(xs[1], xs[0].shape)
    return torch.where(torch.sin(b) > 0, a * 1.3, a * 0.4)


@operation
def picked(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    a = xs[0].reshape(-1)
    order = fitted(xs[1], a.shape).detach().argsort(stable=True)
    return a[order].reshape(xs[0].shape) * 0.9


class SineTimes(torch.autograd.Function):
    """A product whose backward is written by hand."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return torch.sin(a) * b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return ct * b * torch.cos(a), ct * torch.sin(a)


@operation
def own(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    return SineTimes.apply(xs[0], fitted(xs[1], xs[0].shape) + 1.3)


@operation
def detached(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    return xs[0].detach() * 0.9


@operation
def rounded(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    return (xs[0] * 3).to(torch.int64).to(torch.float64) * 0.3


@operation
def masked(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    mine = par.axis_index(op.axes[0]) == op.numbers[0] % par.size(op.axes[0])
    return torch.where(mine, xs[0], xs[0].detach() * 0 if op.numbers[1] else 0.2)


@operation
def weighted_by_rank(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    return xs[0] * (par.axis_index(op.axes[0]).to(torch.float64) * 0.4 + 0.5)


# Products with weights, look-ups


@operation
def product(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    w = p[op.leaf]
    return with_last(xs[0], w.shape[-1]) @ w.T


@operation
def product_of_values(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    a, b = at_least(xs[0], 1), with_last(at_least(xs[1], 2), xs[0].shape[-1] if xs[0].ndim else 1)
    return a @ b.reshape(-1, b.shape[-1])[:EMBED].T * 0.4


@operation
def look_up(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    return p[op.leaf][par.batch["ids"] % p[op.leaf].shape[0]]


@operation
def look_up_in_a_part(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    table = p[op.leaf]
    at = par.batch["ids"] - par.axis_index("tp") * table.shape[0]
    inside = (at >= 0) & (at < table.shape[0])
    return torch.where(inside.unsqueeze(-1), table[at.clamp(0, table.shape[0] - 1)], 0.0)


# Dims


def dim_of(op: Op, x: Tensor, i: int = 0) -> int:
    return op.numbers[i] % x.ndim


@operation
def mean(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    x = at_least(xs[0], 1)
    return x.mean(dim_of(op, x), keepdim=bool(op.numbers[1]))


@operation
def peak(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    x = at_least(xs[0], 1)
    return x.amax(dim_of(op, x)) + x.logsumexp(dim_of(op, x)) * 0.3


@operation
def joined(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    a, b = at_least(xs[0], 1), at_least(xs[1], 1)
    dim = dim_of(op, a)
    return bounded(
        torch.cat([bounded(a, dim).narrow(dim, 0, -(-min(a.shape[dim], 12) // 2)), fitted(b, a.shape)], dim), dim
    )


@operation
def part(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    x = at_least(xs[0], 1)
    dim = dim_of(op, x)
    return x.narrow(dim, x.shape[dim] // 2, x.shape[dim] - x.shape[dim] // 2)


@operation
def turned(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    x = at_least(xs[0], 2)
    return x.transpose(0, -1).contiguous().flip(0)


@operation
def written(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    a, b = at_least(xs[0], 1), xs[1]
    out = torch.zeros_like(a)
    out.copy_(a)
    view = out.narrow(0, 0, -(-out.shape[0] // 2))
    view.mul_(0.5)
    view += fitted(b, view.shape)
    return out


# Collectives


@operation
def psum(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    return par.psum(xs[0], *op.axes)


@operation
def pmax(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    return par.pmax(xs[0], *op.axes)


@operation
def pvary(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    return par.pvary(xs[0], *op.axes)


@operation
def gather(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    x = at_least(xs[0], 1)
    dim = dim_of(op, x)
    return par.all_gather(bounded(x, dim), op.axes[0], dim, to="replicated" if op.numbers[1] else "varying")


@operation
def slice(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    x = at_least(xs[0], 1)
    dim = dim_of(op, x)
    return par.slice(divisible(x, dim, par.size(op.axes[0])), op.axes[0], dim)


@operation
def take(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    x, n = at_least(xs[0], 1), par.size(op.axes[0])
    dim = dim_of(op, x)
    length = -(-x.shape[dim] // 2)
    free = x.shape[dim] - length + 1
    return par.take(x, op.axes[0], dim, tuple((i * (1 + op.numbers[1])) % free for i in range(n)), length)


@operation
def scatter(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    x = at_least(xs[0], 1)
    dim = dim_of(op, x)
    return par.reduce_scatter(divisible(x, dim, par.size(op.axes[0])), op.axes[0], dim)


@operation
def exchange(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    x = at_least(xs[0], 1)
    split, concat = dim_of(op, x), dim_of(op, x, 1)
    x = divisible(x, split, par.size(op.axes[0]))
    return par.all_to_all(x, op.axes[0], split, concat)


@operation
def permute(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    n = par.size(op.axes[0])
    return par.ppermute(xs[0], op.axes[0], tuple((i + op.numbers[0]) % n for i in range(n)))


@operation
def spread(op: Op, xs: list[Tensor], p: Any, par: Any) -> Tensor:
    """One number that tells the elements apart: what a loss adds up."""
    return (xs[0] * ramp(xs[0]) + 0.2 * torch.sin(xs[0])).sum()
