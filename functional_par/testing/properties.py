"""What has to hold of a model in every layout, each property one function of a case that raises AssertionError with all that
is wrong. Nothing is drawn here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from functional_par import tree
from functional_par.comm.base import World
from functional_par.mesh import Mesh
from functional_par.program import compose
from functional_par.run import run
from functional_par.testing.batch import fields_of
from functional_par.testing.case import ADAMW, Case
from functional_par.testing.equivalent import compared
from functional_par.testing.history import History, join_states, on_ranks, plainly
from functional_par.testing.layout import shares_leaves
from functional_par.transforms import Transform


def every_layout_equals_one_process(case: Case) -> None:
    """Loss, gradients and their norm in every step, and weights and moments after the last, are those of one process."""
    program = case.program()
    expected = plainly(program.model, case.batches(), case.training())
    found = compared(case.trained(program, case.layout.mesh), expected)
    fail(f"{case.layout}: not what model(params, batch) gives in one process:", map(str, found))


def the_cut_of_the_batch_does_not_matter(case: Case) -> None:
    """The same with replicas and microbatches alone."""
    program, batches, how = case.program(), case.batches(), case.training(optimizer=None)
    found = compared(on_ranks(program, case.layout.mesh, batches, how), plainly(program.model, batches, how))
    pieces = f"{case.samples[0].rows} rows in {case.layout.pieces} pieces ({case.layout})"
    why = "A layer or the loss mixes rows, or divides by what it counts itself, or model.count is not what the loss counts:"
    fail(f"{pieces} are not one batch. {why}", map(str, found))


def schedules_give_the_same_bits(case: Case) -> None:
    """AFAB and 1F1B give the same bits."""
    plain = replace(
        case.layout, chunks=None, split=case.layout.split if case.layout.stages == case.layout.mesh.pp else None
    )
    layouts = [replace(plain, schedule=name) for name in ("afab", "1f1b")]
    afab, other = (case.trained(case.program(layout), layout.mesh) for layout in layouts)
    fail(f"{case.layout}: afab and 1f1b differ, which only order the same work differently:", _bits(afab, other))


def a_pipeline_alone_changes_no_bit(case: Case) -> None:
    """Stages alone, however the layers are split, give the bits of one rank; of a leaf that several stages read, whose
    gradient is a sum in another order, only until it is summed."""
    program = case.program()
    alone, staged = (case.trained(program, mesh) for mesh in (Mesh(), case.layout.mesh))
    if not shares_leaves(program.model):
        wrong = list(_bits(alone, staged))
    else:
        readers = program.plan(case.layout.mesh).readers
        paths = [path for path in alone.moments[0].grads if len(readers[path]) == 1] if case.clip is None else []
        wrong = ["loss of step 1"] if alone.moments[0].loss != staged.moments[0].loss else []
        wrong += _leaves("gradient of step 1", alone.moments[0].grads, staged.moments[0].grads, paths)
    fail(f"{case.layout}: the stages change bits:", wrong)


def orders_of_transforms_give_equal_plans(case: Case) -> None:
    """The transforms in another order give an equal plan."""
    model, kept = case.model, list[Transform]()
    for other in case.given.others:
        # What replaces leaves of the model is not among the maps that commute.
        changes = type(other).on_model is not Transform.on_model
        model, kept = (other.on_model(model), kept) if changes else (model, [*kept, other])
    transforms = case.layout.transforms(*kept)
    rank = {i: place for place, i in enumerate(case.order)}
    order = sorted(range(len(transforms)), key=lambda i: rank.get(i, i))
    one, two = (compose(*each)(model).plan(case.layout.mesh) for each in (transforms, [transforms[i] for i in order]))
    names = [f.name for f in fields(one) if f.compare and getattr(one, f.name) != getattr(two, f.name)]
    fail(f"{case.layout}: the order {order} of its transforms changes the plan:", names)


def training_goes_on_in_another_layout(case: Case) -> None:
    """Whole weights and moments, gathered in one layout, are the same bits when loaded and gathered in another, where training
    goes on as in one process."""
    assert case.other is not None
    batches, how = [fields_of(batch) for batch in case.batches()], case.training()
    first, rest = batches[:1], batches[1:]
    before, program = case.program(), case.program(case.other)

    def begin(world: World) -> Any:
        step = before.step(world, ADAMW, case.clip, case.norm, dtype=torch.float64, engine=how.engine)
        state = step.init(how.seed)
        for batch in first:
            state, _ = step(state, batch)
        return step.gather(state), step.gather_opt(state)

    whole = run(begin, case.layout.mesh, backend="threads")[0]

    def go_on(world: World) -> Any:
        step = program.step(world, ADAMW, case.clip, case.norm, dtype=torch.float64, engine=how.engine)
        loaded = state = step.load(*whole, step=len(first), seed=how.seed)
        for batch in rest:
            state, _ = step(state, batch)
        return (step.gather(loaded), step.gather_opt(loaded)), state

    results = run(go_on, case.other.mesh, backend="threads")
    names = ("parameters", *ADAMW.slots)
    wrong = [
        f"{name}: {path} is not what was loaded"
        for name, a, b in zip(names, _trees(whole), _trees(results[0][0]), strict=True)
        for path in _leaves("", a, b, a)
    ]
    plan, copies = program.plan(case.other.mesh), list[str]()
    params, opt = join_states(plan, [state for _, state in results], copies)
    expected = plainly(program.model, batches, how)
    wrong += map(str, compared(History(expected.moments, params, opt, tuple(copies)), expected))
    fail(f"trained in {case.layout}, then in {case.other}: not what one process gives:", wrong)


def _trees(whole: Any) -> list[dict[str, Tensor]]:
    params, opt = whole
    return [tree.flatten(params), *(tree.flatten(opt[slot]) for slot in ADAMW.slots)]


def _bits(one: History, two: History) -> Iterator[str]:
    """What is not the same in every bit."""
    for i, (a, b) in enumerate(zip(one.moments, two.moments, strict=True), 1):
        yield from (
            f"{name} of step {i}" for name in ("loss", "norm", "tokens") if getattr(a, name) != getattr(b, name)
        )
        yield from _leaves(f"gradient of step {i}", a.grads, b.grads, a.grads)
    yield from _leaves("parameter", one.params, two.params, one.params)
    for slot in one.opt:
        yield from _leaves(slot, one.opt[slot], two.opt[slot], one.opt[slot])


def _leaves(what: str, one: Mapping[str, Tensor], two: Mapping[str, Tensor], paths: Any) -> list[str]:
    return [f"{what}: {path}" for path in paths if path not in two or not torch.equal(one[path], two[path])]


def fail(what: str, wrong: Any) -> None:
    """AssertionError that says what is wrong, a line each, if anything is."""
    if lines := [f"  {line}" for line in wrong]:
        raise AssertionError("\n".join([what, *lines]))
