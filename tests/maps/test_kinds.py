"""The kinds of a map's values are true: over random operations, what the ranks hold is, put together by its kind, what one
process computes. Operations that are refused are left out, so this says nothing of them; the tests below do.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

import functional_par as fp
from functional_par.errors import ParallelError
from functional_par.maps.follow import Following, TraceLeaf
from functional_par.maps.leaf import RunLeaf
from functional_par.maps.types import WHOLE, Kind
from functional_par.random import key
from functional_par.spec import Debt, Spec
from tests.oracle import close

ROWS, COLS, DP = 12, 6, 2

UNARY = {
    "neg": lambda x: -x,
    "half": lambda x: 0.5 * x,
    "over": lambda x: x / 3,
    "shift": lambda x: x + 1,
    "square": lambda x: x.square(),
    "abs": lambda x: x.abs(),
    "clamp": lambda x: x.clamp(-0.3, 0.4),
    "tanh": lambda x: x.tanh(),
    "sign": lambda x: x.sign(),
    "positive": lambda x: x * (x > 0),
    "transpose": lambda x: x.mT if x.ndim > 1 else x,
    "sum": lambda x: x.sum(),
    "sum0": lambda x: x.sum(0) if x.ndim else x,
    "sum1": lambda x: x.sum(-1, keepdim=True) if x.ndim else x,
    "mean1": lambda x: x.mean(-1) if x.ndim else x,
    "amax0": lambda x: x.amax(0, keepdim=True) if x.ndim else x,
    "norm": lambda x: x.norm(),
    "norm1": lambda x: torch.linalg.vector_norm(x, dim=-1) if x.ndim else x,
    "row": lambda x: x[0] if x.ndim else x,
    "column": lambda x: x[..., 1:2] if x.ndim else x,
    "flip": lambda x: x.flip(-1) if x.ndim else x,
    "flat": lambda x: x.flatten(),
    "more": lambda x: x.unsqueeze(-1) if x.ndim < 2 else x,
    "halves": lambda x: x.unflatten(-1, (-1, 2)).flatten(0, 1) if x.ndim == 2 else x,
    "expand": lambda x: x.expand(2, *x.shape) if x.ndim < 2 else x,
    "ones": lambda x: torch.ones_like(x),
    "softmax": lambda x: x.softmax(-1) if x.ndim else x,
    "sort": lambda x: x.sort(-1)[0] if x.ndim else x,
    "cumsum": lambda x: x.cumsum(0) if x.ndim else x,
    "cast": lambda x: x.to(torch.float64, copy=True),
}

BINARY = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - 2 * y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / (y.square() + 1),
    "max": lambda x, y: torch.maximum(x, y),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "matmul": lambda x, y: x @ y,
    "outer": lambda x, y: x[:, None] * y if x.ndim == y.ndim == 1 else x,
    "gram": lambda x, y: x.mT @ y if x.ndim == y.ndim == 2 else x,
    "batched": lambda x, y: (x[None] @ y[None])[0] if x.ndim == y.ndim == 2 else x,
}

COLLECTIVES = {
    "psum dp": lambda x, leaf: leaf.psum(x, "dp"),
    "psum tp": lambda x, leaf: leaf.psum(x, "tp"),
    "psum owed": lambda x, leaf: leaf.psum(x, *leaf.owes),
    "amax": lambda x, leaf: leaf.amax(x),
    "norm of all": lambda x, leaf: leaf.norm(x),
    "gather 0": lambda x, leaf: leaf.all_gather(x, "tp", 0),
    "gather 1": lambda x, leaf: leaf.all_gather(x, "tp", 1) if x.ndim == 2 else x,
}


@dataclass(frozen=True)
class Instruction:
    """One operation on values made so far, counted from the last."""

    name: str
    a: int
    b: int = 0

    def __call__(self, pool: list[Any], leaf: Any) -> Any:
        x, y = pool[-1 - self.a % len(pool)], pool[-1 - self.b % len(pool)]
        if self.name in UNARY:
            return UNARY[self.name](x)
        return BINARY[self.name](x, y) if self.name in BINARY else COLLECTIVES[self.name](x, leaf)


names = st.sampled_from([*UNARY, *BINARY, *BINARY, *COLLECTIVES, *COLLECTIVES, *COLLECTIVES])
instructions = st.lists(st.builds(Instruction, names, st.integers(0, 3), st.integers(0, 4)), min_size=8, max_size=30)


def spec_of(cut: int | None) -> Spec:
    owes = [Debt("dp", "rows"), *([Debt("tp", "meets")] if cut is None else [])]
    axes = tuple("tp" if dim == cut else None for dim in range(2))
    return Spec("w", (ROWS, COLS), ("a", "b"), axes, owes=tuple(owes))


def followed(program: list[Instruction], spec: Spec, mesh: fp.Mesh) -> tuple[list[Instruction], list[Kind]]:
    """The instructions that are accepted, and the kind of each value."""
    typing = Following()
    cut = frozenset((axis, dim) for dim, axis in enumerate(spec.axes) if axis)

    def meta(kind: Kind) -> Any:
        return typing.note(torch.empty(spec.local_shape(mesh), dtype=torch.float64, device="meta"), kind)

    param = meta(Kind(cut=cut))
    leaf = TraceLeaf(typing, spec, spec.pending, param, lambda axis: getattr(mesh, axis), torch.float64)
    pool, accepted = [leaf.normal(COLS, 3), param, meta(Kind(frozenset(spec.pending), cut))], []
    for instruction in program:
        try:
            with torch.no_grad(), typing:
                out = instruction(pool, leaf)
        except (ParallelError, RuntimeError, IndexError):
            continue  # refused, or shapes that do not fit
        accepted.append(instruction)
        pool.append(out)
    return accepted, [typing.kind(x) for x in pool]


def run(program: list[Instruction], leaf: Any, grad: torch.Tensor) -> list[torch.Tensor]:
    pool = [leaf.normal(COLS, 3), leaf.param, grad]
    for instruction in program:
        pool.append(instruction(pool, leaf))
    return pool


@functools.cache
def numbers(tp: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Terms of the gradient of each dp and tp rank, and the parameter."""
    generator = torch.Generator().manual_seed(tp)
    draw = functools.partial(torch.randn, dtype=torch.float64, generator=generator)
    return draw(DP, tp, ROWS, COLS), draw(ROWS, COLS)


def together(kind: Kind, values: list[torch.Tensor], mesh: fp.Mesh) -> torch.Tensor:
    """The whole that values of this kind stand for. Whatever is neither a sum nor a block is the same on every rank."""
    rows = [[values[mesh.rank(dp=d, tp=t)] for t in range(mesh.tp)] for d in range(mesh.dp)]
    over_tp = [joined(kind, "tp", row) for row in rows]
    return joined(kind, "dp", over_tp)


def joined(kind: Kind, axis: str, parts: list[torch.Tensor]) -> torch.Tensor:
    dims = [dim for a, dim in kind.cut if a == axis]
    if dims:
        return torch.cat(parts, dims[0])
    if axis in kind.partial:
        return torch.stack(parts).sum(0)
    for other in parts[1:] if parts[0].numel() else ():
        close(other, parts[0], f"copies along {axis}")
    return parts[0]


@given(instructions, st.sampled_from([2, 3]), st.sampled_from([None, 0, 1]))
def test_what_ranks_hold_is_by_its_kind_what_one_process_computes(program, tp, cut):
    spec, mesh = spec_of(cut), fp.Mesh(dp=DP, tp=tp)
    accepted, kinds = followed(program, spec, mesh)
    event(f"accepted {len(accepted) * 10 // len(program) / 10:.1f}")
    terms, param = numbers(tp)
    terms = terms if cut is None else terms.sum(1, keepdim=True).expand_as(terms)

    def main(world):
        grad, mine = terms[world.coords.dp, world.coords.tp], param
        if cut is not None:
            grad, mine = (x.chunk(tp, cut)[world.coords.tp] for x in (grad, mine))
        leaf = RunLeaf(world, spec, spec.pending, mine, 0, key(0), torch.float64)
        return run(accepted, leaf, grad)

    pools = fp.run(main, mesh, backend="threads")
    whole = terms.sum((0, 1)) if cut is None else terms[:, 0].sum(0)
    alone = fp.run(lambda world: RunLeaf(world, spec, spec.pending, param, 0, key(0), torch.float64), fp.Mesh())[0]
    expected = run(accepted, alone, whole)
    for i, (kind, want) in enumerate(zip(kinds, expected, strict=True)):
        if want.numel():
            close(together(kind, [pool[i] for pool in pools], mesh), want, f"value {i}, {kind}")


def kind_of(program, cut, tp=2):
    accepted, kinds = followed(program, spec_of(cut), fp.Mesh(dp=DP, tp=tp))
    return kinds[-1] if len(accepted) == len(program) else None


@pytest.mark.parametrize(
    ("program", "cut", "kind"),
    [
        ([Instruction("half", 0)], 0, Kind(frozenset({"dp"}), frozenset({("tp", 0)}))),
        ([Instruction("transpose", 0)], 0, Kind(frozenset({"dp"}), frozenset({("tp", 1)}))),
        ([Instruction("sum", 0)], 1, Kind(frozenset({"dp", "tp"}))),
        ([Instruction("sum0", 0)], 1, Kind(frozenset({"dp"}), frozenset({("tp", 0)}))),
        ([Instruction("psum owed", 0)], None, WHOLE),
        ([Instruction("psum dp", 0), Instruction("square", 0)], 0, Kind(cut=frozenset({("tp", 0)}))),
        ([Instruction("psum dp", 0), Instruction("square", 0), Instruction("sum", 0)], 0, Kind(frozenset({"tp"}))),
        ([Instruction("matmul", 0, 2)], 0, Kind(frozenset({"dp"}), frozenset({("tp", 0)}))),
        ([Instruction("gram", 1, 0)], 0, Kind(frozenset({"dp", "tp"}))),
        ([Instruction("psum dp", 0), Instruction("gather 0", 0), Instruction("sort", 0)], 0, WHOLE),
        ([Instruction("flat", 0)], 0, Kind(frozenset({"dp"}), frozenset({("tp", 0)}))),
        ([Instruction("mul", 0, 1)], 1, Kind(frozenset({"dp"}), frozenset({("tp", 1)}))),
    ],
)
def test_known_operations_are_accepted_with_the_right_kind(program, cut, kind):
    assert kind_of(program, cut) == kind


@pytest.mark.parametrize(
    ("program", "cut"),
    [
        ([Instruction("square", 0)], 0),
        ([Instruction("shift", 0)], 0),
        ([Instruction("norm", 0)], None),
        ([Instruction("psum tp", 0)], 0),
        ([Instruction("psum dp", 0), Instruction("psum dp", 0)], 0),
        ([Instruction("psum dp", 0), Instruction("norm", 0)], 0),
        ([Instruction("psum dp", 0), Instruction("amax0", 0)], 0),
        ([Instruction("psum dp", 0), Instruction("softmax", 0)], 1),
        ([Instruction("psum dp", 0), Instruction("flat", 0)], 1),
        ([Instruction("mul", 0, 0)], 0),
        ([Instruction("matmul", 0, 2)], 1),
        ([Instruction("add", 0, 1)], 0),
        ([Instruction("psum dp", 0), Instruction("row", 0)], 0),
        ([Instruction("div", 0, 0)], None),
    ],
)
def test_operations_that_mix_terms_or_blocks_are_refused(program, cut):
    assert kind_of(program, cut) is None
