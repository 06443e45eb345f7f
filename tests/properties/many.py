"""Trains a drawn layout on ranks that are threads, checking on the way what every layout promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import functional_par as fp
from functional_par import tree

from . import counts
from .inner import close
from .layouts import Layout
from .single import OPTIMIZERS, Batch, Trained


def train(
    layout: Layout,
    batches: Sequence[Batch],
    optimizer: str,
    program: fp.Program | None = None,
    pure: bool = False,
    seed: int = 0,
    **options: Any,
) -> Trained:
    """The same as ``single.train`` on the ranks of a mesh. Metrics are the same on every rank, copies of a shard have
    equal bits after every step, and what was communicated is what the formulas say.

    Args:
        program: of the layout, if it is at hand.
        pure: also take each step twice, and look that its arguments stay as they were.
    """
    program = program or layout.program()

    def main(world: fp.World) -> Any:
        step = program.step(world, OPTIMIZERS[optimizer].ours(), dtype=torch.float64, engine=layout.engine, **options)
        state, seen, trail = step.init(seed), [], []
        for batch in batches:
            state, metrics = twice(step, state, batch) if pure else step(state, batch)
            seen.append((metrics["loss"], metrics["grad_norm"], metrics["tokens"], metrics["lr"]))
            trail.append({path: x.clone() for path, x in state.flat.items()})
        steps = len(batches) * (2 if pure else 1)
        counts.check(step.plan, world.rank, world.record, steps, batches[0], options.get("norm", 2.0))
        return state, seen, trail

    states, seen, trails = zip(*fp.run(main, layout.mesh, backend="threads", timeout=30.0), strict=True)
    assert all(other == seen[0] for other in seen), "metrics differ between ranks"
    plan = program.plan(layout.mesh)
    same_copies(plan, trails)
    losses, norms, tokens, _ = zip(*seen[0], strict=True)
    slots = {slot: tree.flatten(fp.unshard([state.opt[slot] for state in states], plan)) for slot in states[0].flat_opt}
    weights = tree.flatten(fp.unshard([state.params for state in states], plan))
    return Trained(list(losses), list(norms), list(tokens), weights, slots)


def twice(step: Any, state: fp.State, batch: Batch) -> tuple[fp.State, Any]:
    """A step, taken twice: the same bits, and its arguments are left alone."""
    before = contents(state, batch)
    (first, metrics), (second, again) = step(state, batch), step(state, batch)
    same_bits(contents(state, batch), before)
    same_bits(contents(second, {}), contents(first, {}))
    assert metrics == again
    assert (state.step + 1, state.seed) == (first.step, first.seed) == (second.step, second.seed)
    return first, metrics


def contents(state: fp.State, batch: Batch) -> dict[Any, Tensor]:
    """A copy of every tensor."""
    slots = {(slot, path): x for slot, leaves in state.flat_opt.items() for path, x in leaves.items()}
    return {key: x.clone() for key, x in {**state.flat, **slots, **batch}.items()}


def same_bits(a: dict[Any, Tensor], b: dict[Any, Tensor]) -> None:
    assert a.keys() == b.keys()
    for key, x in a.items():
        assert torch.equal(x, b[key]), key


def same_copies(plan: fp.Plan, trails: Sequence[list[dict[str, Tensor]]]) -> None:
    """Every copy of every shard has the same bits after every step: replicas, stages of a tie, tp ranks."""
    for step in range(len(trails[0])):
        first: dict[Any, Tensor] = {}
        for rank, coords in enumerate(plan.mesh):
            for path, x in trails[rank][step].items():
                key = path, plan.specs[path].starts(plan.mesh, coords)
                assert torch.equal(first.setdefault(key, x), x), (path, rank, step)


def equal(actual: Trained, expected: Trained) -> None:
    """Losses, norms, tokens, weights and moments agree to 1e-10 max(1, max|expected|), a leaf at a time."""
    assert actual.tokens == expected.tokens
    for name in ("losses", "norms"):
        close(*(torch.tensor(getattr(run, name), dtype=torch.float64) for run in (actual, expected)), name)
    for found, wanted in [
        (actual.weights, expected.weights),
        *((actual.slots[slot], expected.slots[slot]) for slot in expected.slots),
    ]:
        assert found.keys() == wanted.keys()
        for path, x in wanted.items():
            close(found[path], x, path)


def identical(actual: Trained, expected: Trained) -> None:
    """The same in every bit."""
    assert (actual.losses, actual.norms, actual.tokens) == (expected.losses, expected.norms, expected.tokens)
    same_bits(actual.weights, expected.weights)
    for slot in expected.slots:
        same_bits(actual.slots[slot], expected.slots[slot])
