"""What is no schedule, no cost and no size is refused where it is given."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

import functional_par as fp
from functional_par import Mesh, Model, ModelError, Param, ScheduleError
from functional_par.pipeline import Action, Costs, Schedule, greedy, make_schedule, simulate, verify, write_schedule

from .models import skipping

ONE = Action(0, "F", 0), Action(0, "B", 0)


def test_rows_may_be_lists_and_are_read_once():
    made = Schedule("x", [iter(ONE)])
    assert made.rows == (ONE,)
    assert made == Schedule("x", (ONE,)) == Schedule("x", (row for row in [["0F0", "0B0"]]))
    assert verify(made).live == (1,)


@pytest.mark.parametrize("rows", [None, 3, "0F0", [None], [3], [["F"]], [[(1, 2)]], [[(0, "F", 0, 1)]]], ids=str)
def test_rows_that_are_none_are_refused(rows):
    with pytest.raises(ScheduleError, match="schedule x"):
        Schedule("x", rows)


@pytest.mark.parametrize(
    "row", [("0F0",), ((0, "F", 0),), (None,), (Action(0, ["F"], 0),), (Action(-1, "F", 0),)], ids=str
)
def test_what_is_no_action_is_no_action_for_the_proof_and_the_clock(row):
    for run in (verify, simulate):
        with pytest.raises(ScheduleError, match=r"schedule x: action 0 of rank 0"):
            run(Schedule("x", (row,)))


@pytest.mark.parametrize("size", [-1, 1.5, "2", True, [1, "2"]], ids=str)
def test_bytes_of_an_activation_are_integers(size):
    with pytest.raises(ScheduleError, match="is no number of bytes"):
        simulate(make_schedule("1f1b", 2, 2), activation_bytes=size)


@pytest.mark.parametrize(
    "cost", [10**400, 1e308, -1, math.nan, math.inf, "1", True, None], ids=lambda cost: str(cost)[:9]
)
def test_costs_are_times(cost):
    with pytest.raises(ScheduleError, match="is no time"):
        Costs(forward=cost)


@pytest.mark.parametrize(
    ("placement", "microbatches"),
    [((), 1), ((-1, 0), 1), ((0.0,), 1), ("01", 1), (3, 1), ((0,), 0), ((0,), True)],
    ids=str,
)
def test_the_list_scheduler_needs_ranks_and_microbatches(placement, microbatches):
    with pytest.raises(
        ScheduleError, match=re.escape(f"greedy(placement={placement!r}, microbatches={microbatches!r})")
    ):
        greedy(placement, microbatches)


def test_actions_that_overlap_are_not_nested(tmp_path):
    path = tmp_path / "deep.csv"
    path.write_text("(" * 5000 + "0F0" + ")OVERLAP_F_B" * 5000)
    with pytest.raises(ScheduleError, match="row 1, column 1"):
        fp.pipeline.read_schedule(path)


def test_a_file_may_be_a_path_in_any_case(tmp_path: Path):
    path = tmp_path / "MINE.CSV"
    write_schedule(make_schedule("zb-h1", 2, 3), path)
    for given in (path, str(path)):
        assert fp.compose(fp.stage_pp(given, 3))(skipping(4)).plan(Mesh(pp=2)).schedule == "MINE.CSV"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, at the first jvp
def test_a_layer_in_forward_mode_does_not_run_in_several_threads():
    def layer(p, x, par):
        x = x["x"] if isinstance(x, dict) else x
        return x + torch.func.jvp(lambda v: (v @ p).sin(), (x,), (x.cos(),))[1]

    def loss(p, x, par):
        return x.square().sum(), torch.tensor(len(x))

    weight = Param((3, 3), "out in")
    model = Model(
        {"a": weight, "b": weight},
        [("a", "a", layer), ("b", "b", layer)],
        loss,
        {"x": fp.Input((None, 3), torch.float64)},
    )

    program = fp.compose(fp.stage_pp("1f1b", 2))(model)

    def main(world):
        step = program.step(world, fp.optim.sgd(lr=0.1), dtype=torch.float64)
        return step(step.init(0), {"x": torch.ones(4, 3, dtype=torch.float64)})[1]["loss"]

    assert math.isfinite(fp.run(main, Mesh())[0])
    with pytest.raises(ModelError, match=r"layer 'a' takes a derivative in forward mode .* ranks that are threads"):
        fp.run(main, Mesh(pp=2))
