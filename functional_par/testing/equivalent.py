"""Is a program on a mesh the same function as its model in one process? Answered by the numbers, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functional_par.errors import CompositionError, DataError
from functional_par.mesh import Mesh
from functional_par.optim import Optimizer
from functional_par.plan import Plan
from functional_par.program import Program
from functional_par.testing.batch import make_batch
from functional_par.testing.history import Flat, History, Moment, Training, on_ranks, plainly

TOLERANCE = 1e-10
"""Largest difference, relative to ``max(1, largest entry)``."""

GivenBatch = Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | None


@dataclass(frozen=True)
class Difference:
    """Something that is not what one process computes.

    Attributes:
        what: ``"loss"``, ``"norm"``, ``"tokens"``, or the path of a leaf; or a sentence, if ``kind`` is ``"copies"``.
        largest: largest absolute difference of an entry.
        ratio: by which factor the program's value is the reference's, where one factor explains it; else None.
        kind: of a leaf what differs: ``"gradient"``, ``"parameter"``, or the name of a slot of the optimizer. ``"copies"`` is
            what ranks should hold alike and do not.
        step: of which step, from 1.
    """

    what: str
    largest: float
    ratio: float | None
    kind: str = "gradient"
    step: int = 1

    def __str__(self) -> str:
        if self.kind == "copies":
            return self.what
        times = "" if self.ratio is None else f", {self.ratio:.6g} times what it should be"
        if self.ratio is not None and abs(self.ratio - 1) < 1e-6:
            times = ", about the rounding of float32: is something computed in a dtype of its own?"
        what = self.what if self.kind == "metric" else f"{self.kind} of {self.what}"
        when = "" if self.step == 1 and self.kind in ("metric", "gradient") else f", step {self.step}"
        return f"{what}{when}: off by {self.largest:.3g}{times}"


def assert_equivalent(
    program: Program,
    mesh: Mesh,
    batch: GivenBatch = None,
    *,
    steps: int = 1,
    optimizer: Optimizer | None = None,
    clip: float | None = None,
    norm: float = 2.0,
    seed: int = 0,
    engine: str = "func",
    donate: bool = False,
) -> None:
    """Raise AssertionError unless ``program`` on ``mesh`` computes what its model computes in one process.

    Compares, on threads and in float64: the loss, the global gradient norm, the number of loss terms and each leaf's gradient
    in every step; with an optimizer, parameters and its state after the last step; and whether ranks that hold the same
    leaf hold the same bits. Each to 1e-10, relative to ``max(1, largest entry)``. Take a small model and batch.

    A program with maps of its own on gradients or updates is compared with itself on one rank; ``precision`` is left out.

    Args:
        program: from ``fp.compose``.
        mesh: any mesh that the program has a plan for.
        batch: a global batch, a dict of tensors with all rows in dim 0, for every step; or one batch a step. None makes
            batches up: see ``made_up``.
        steps: how many steps to take.
        optimizer: from ``fp.optim``; None moves no parameter, so that steps differ by their batches alone.
        clip, norm, engine, donate: as ``program.step`` takes them.
        seed: of the initial parameters.

    Raises:
        AssertionError: with all that differs in the first step that does, by how much, and by which factor if there is one.

    >>> import functional_par as fp
    >>> model = fp.models.gpt(vocab=5, d_model=4, n_layers=1, n_heads=2, seq_len=2)
    >>> program = fp.compose(fp.shard_tp("REDUCE_SCATTER"), fp.dp_reduce())(model)
    >>> assert_equivalent(program, fp.Mesh(dp=2, tp=2), steps=2, optimizer=fp.optim.adamw(lr=0.01), clip=0.1)
    """
    how = Training(optimizer, clip, norm, seed, engine, donate)
    if found := _differences(program, mesh, batch, steps, how):
        lines = "\n".join(f"  {difference}" for difference in found)
        raise AssertionError(f"on {mesh} the program is not the function that model(params, batch) is:\n{lines}")


def differences(
    program: Program, mesh: Mesh, batch: GivenBatch = None, *, steps: int = 1, seed: int = 0, **how: Any
) -> tuple[Difference, ...]:
    """What differs, the loss first; see ``assert_equivalent``, whose arguments it takes."""
    return _differences(program, mesh, batch, steps, Training(seed=seed, **how))


def made_up(plan: Plan, steps: int = 1) -> list[dict[str, Tensor]]:
    """A batch a step that a plan can take: two rows a microbatch, some labels ignored and one row ignored altogether (if
    the model ignores labels); open sizes are twice tp."""
    rows = 2 * plan.pieces
    kept = tuple(0 if i == rows // 2 else 1 + i % 2 for i in range(rows))
    return [make_batch(plan.source, rows, seed=i, size=2 * plan.mesh.tp, kept=kept) for i in range(steps)]


def _differences(program: Program, mesh: Mesh, batch: GivenBatch, steps: int, how: Training) -> tuple[Difference, ...]:
    if not isinstance(program, Program):
        raise CompositionError(f"assert_equivalent({type(program).__name__}, mesh): a program, from fp.compose.")
    program = program.exact
    plan = program.plan(mesh)
    if batch is None:
        batches: Sequence[Mapping[str, Tensor]] = made_up(plan, steps)
    elif isinstance(batch, Mapping):
        batches = [batch] * steps
    else:
        batches = list(batch)
    if not batches or not all(isinstance(each, Mapping) for each in batches):
        raise DataError(
            f"assert_equivalent(batch, steps={steps}): it compares at least one step, on a dict of tensors or a list of such, "
            "one a step."
        )
    # What the user's maps make of gradients no plain function says; one rank alone does.
    alone = on_ranks(program, Mesh(), batches, how) if plan.maps else plainly(program.model, batches, how)
    return compared(on_ranks(program, mesh, batches, how), alone)


def compared(found: History, expected: History) -> tuple[Difference, ...]:
    """What of ``found`` is not ``expected``: of the first step that differs, or else of what is left after the last; then
    the copies that differ."""
    steps = enumerate(zip(found.moments, expected.moments, strict=True), 1)
    per_step = (tuple(_of_step(i, a, b)) for i, (a, b) in steps)
    first = next(filter(None, per_step), ())
    copies = tuple(Difference(what, 0.0, None, "copies") for what in found.copies)
    return (first or tuple(_of_end(found, expected))) + copies


def _of_step(step: int, found: Moment, expected: Moment) -> Iterator[Difference]:
    """The norm last: it follows from the gradients, and if it is wrong alone, clipping makes them wrong."""
    yield from _difference("loss", found.loss, expected.loss, "metric", step)
    yield from _difference("tokens", found.tokens, expected.tokens, "metric", step)
    yield from _of_leaves(found.grads, expected.grads, "gradient", step)
    yield from _difference("norm", found.norm, expected.norm, "metric", step)


def _of_end(found: History, expected: History) -> Iterator[Difference]:
    step = len(found.moments)
    yield from _of_leaves(found.params, expected.params, "parameter", step)
    for slot, leaves in expected.opt.items():
        yield from _of_leaves(found.opt[slot], leaves, slot, step)


def _of_leaves(found: Flat, expected: Flat, kind: str, step: int) -> Iterator[Difference]:
    for path, truth in expected.items():
        yield from _difference(path, found[path], truth, kind, step)


def _difference(what: str, found: Any, expected: Any, kind: str, step: int) -> Iterator[Difference]:
    value, truth = (torch.as_tensor(x, dtype=torch.float64) for x in (found, expected))
    largest = (value - truth).abs().max().item() if truth.numel() else 0.0
    scale = max(1.0, truth.abs().max().item() if truth.numel() else 0.0)
    if largest <= TOLERANCE * scale:
        return
    square: Any = (truth * truth).sum().item()
    ratio = (value * truth).sum().item() / square if square else None
    if ratio is not None and (value - ratio * truth).abs().max().item() > 1e-6 * scale:
        ratio = None
    yield Difference(what, largest, ratio, kind, step)
