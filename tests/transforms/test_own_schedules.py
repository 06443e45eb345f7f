"""A schedule of the user's own: as data, as a function, as a file. It is proved, then run like any other."""

from __future__ import annotations

import re

import pytest
import torch

import functional_par as fp
from functional_par import CompositionError, Mesh, ScheduleError
from functional_par.pipeline import Schedule, make_schedule, write_schedule
from functional_par.tree import flatten

from ..oracle import close, gradients, token_batch
from ..pipeline.models import VOCAB, skipping

# Two ranks, two stages on the first, one on the second; the weights of one microbatch wait for the end.
OWN = [
    ["0F0", "0F1", "2F0", "2I0", "2F1", "2B1", "0B0", "0I1", "2W0", "0W1"],
    ["1F0", "1F1", "1I0", "1I1", "1W1", "1W0"],
]


def function_of(ranks, microbatches):
    """A user's function: rows of text."""
    return [[str(action) for action in row] for row in make_schedule("zb-h1", ranks, microbatches).rows]


def check(schedule, pp, microbatches):
    program = fp.compose(fp.tie("out", "table"), fp.stage_pp(schedule, microbatches))(skipping(7))
    batch = token_batch(VOCAB, 2 * microbatches, 3)
    params = flatten(program.model.init(0, torch.float64))
    loss, expected = gradients(program.model, params, batch)

    def main(world):
        step = program.step(world, fp.optim.sgd(lr=1.0), dtype=torch.float64, poison=True)
        moved, metrics = step(step.init(0), batch)
        return step.gather(moved), metrics["loss"]

    weights, found = fp.run(main, Mesh(pp=pp), timeout=20.0)[0]
    close(torch.tensor(found, dtype=torch.float64), loss)
    moved = flatten(weights)
    for path, x in params.items():
        close(x - moved[path], expected.get(path, torch.zeros_like(x)), path)
    return program


def test_rows_of_actions_run_and_are_the_gradient():
    program = check(Schedule.of("mine", OWN), 2, 2)
    plan = program.plan(Mesh(pp=2))
    assert (plan.schedule, plan.placement, len(plan.stages)) == ("mine", (0, 1, 0), 3)
    assert plan.specs["table"].owners == (0,)
    assert plan.specs["table"].owes == ()  # both stages that read it are on one rank


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_a_function_of_ranks_and_microbatches_makes_the_schedule(pp):
    program = check(function_of, pp, 3)
    assert program.plan(Mesh(pp=pp)).schedule == ("function_of" if pp > 1 else "1f1b")


def test_a_file_is_read_when_the_program_is_composed(tmp_path):
    path = tmp_path / "mine.csv"
    write_schedule(make_schedule("interleaved", 2, 3), path)
    program = check(str(path), 2, 3)
    assert len(program.plan(Mesh(pp=2)).stages) == 4


def composed(schedule, microbatches=2, pp=2):
    return fp.compose(fp.stage_pp(schedule, microbatches))(skipping(7)).plan(Mesh(pp=pp))


def test_a_schedule_that_cannot_run_is_an_error_of_the_plan():
    wrong = [["0F0", "0F1", "0B1", "0B0"], ["1F0", "1B0", "1F1"]]
    with pytest.raises(ScheduleError, match="1B1"):
        composed(Schedule.of("mine", wrong))
    stuck = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    with pytest.raises(ScheduleError, match="rank 0 at 0B0"):
        composed(Schedule.of("mine", stuck))


def test_a_schedule_of_another_number_of_ranks_is_refused_with_both():
    message = (
        "stage_pp(schedule='mine'): it is a schedule of 2 ranks, but pp=3. Give one with a row for each rank of pp"
    )
    with pytest.raises(CompositionError, match=re.escape(message)):
        composed(Schedule.of("mine", OWN), pp=3)


def test_a_schedule_of_another_number_of_microbatches_is_refused():
    message = "stage_pp(schedule='mine'): it is a schedule of 2 microbatches, but microbatches=4. Make them equal"
    with pytest.raises(CompositionError, match=re.escape(message)):
        composed(Schedule.of("mine", OWN), microbatches=4)


@pytest.mark.parametrize("made", [None, 3, "0F0"], ids=str)
def test_a_function_that_makes_no_schedule_is_refused_with_what_it_made(made):
    def mine(ranks, microbatches):
        return made

    with pytest.raises(
        CompositionError, match=rf"stage_pp\(schedule=mine\): it returned {type(made).__name__}, which is no"
    ):
        composed(mine)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (["0F0"], "schedule mine, rank 0: '0F0' is no list of actions; write one list of actions for each rank"),
        ([[], 3], "schedule mine, rank 1: 3 is no list of actions; write one"),
        (
            [["0F0"], ["1F0", "0f0"]],
            "schedule mine, rank 1, action 1 (counted from 0): '0f0' is no action: write stage",
        ),
        ([[("a",)]], "schedule mine, rank 0, action 0 (counted from 0): ('a',) is no action, such as '2F0'."),
        ([["0F0", None]], "schedule mine, rank 0, action 1 (counted from 0): None is no action, such as '2F0'."),
    ],
    ids=["row", "number", "text", "tuple", "none"],
)
def test_of_what_is_no_action_the_place_comes_first(made, message):
    def mine(ranks, microbatches):
        return made

    with pytest.raises(ScheduleError, match=f"^{re.escape(message)}") as info:
        composed(mine)
    assert ".." not in str(info.value)
    with pytest.raises(ScheduleError, match=f"^{re.escape(message)}"):
        Schedule.of("mine", made)


def test_rows_that_are_none_are_refused():
    with pytest.raises(ScheduleError, match=r"schedule mine: 3 is no list of rows; write one list of actions for each"):
        Schedule.of("mine", 3)


@pytest.mark.parametrize(
    ("maker", "takes"),
    [(lambda p: [], "(p): too many positional arguments"), (lambda p, m, *, v: [], "(p, m, *, v): missing a required")],
    ids=["fewer", "more"],
)
def test_a_function_of_something_else_is_refused_with_its_cause(maker, takes):
    message = (
        "stage_pp(schedule=<lambda>): it is called with (ranks, microbatches), here (2, 2), but it is a function of "
    )
    with pytest.raises(CompositionError, match=re.escape(message + takes)) as info:
        composed(maker)
    assert isinstance(info.value.__cause__, TypeError)


def test_what_a_function_raises_itself_stays_what_it_is():
    def mine(ranks, microbatches):
        return len(ranks)

    with pytest.raises(TypeError, match="has no len"):
        composed(mine)


def test_a_schedule_of_ones_own_has_the_chunks_that_it_names():
    with pytest.raises(CompositionError, match=re.escape("stage_pp(chunks=2): a schedule of your own has the stages")):
        fp.stage_pp(Schedule.of("mine", OWN), 2, chunks=2)
