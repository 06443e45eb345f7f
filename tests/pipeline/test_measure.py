"""Costs of layers, measured: all of them, positive, and good for a split and for the simulator."""

from __future__ import annotations

import re

import pytest
import torch

import functional_par as fp
from functional_par.errors import CompositionError
from functional_par.pipeline.layer_costs import LayerCosts
from functional_par.pipeline.measure import measure

from ..toys import odd, regression, small_gpt

TOKENS = {"tokens": (2, 4), "labels": (2, 4)}


@pytest.mark.parametrize("engine", ["func", "tape"])
def test_every_layer_and_the_loss_have_positive_costs(engine):
    costs = measure(odd(), TOKENS, torch.float64, engine, rounds=1)
    names = [layer.name for layer in odd().all_layers]
    assert list(costs.forward) == list(costs.total) == list(costs.saved) == names
    assert all(x > 0 for each in (costs.forward, costs.input_backward, costs.total) for x in each.values())
    assert all(x >= 0 for x in costs.weight_backward.values())


def test_weight_gradients_that_can_wait_are_timed_by_themselves():
    costs = measure(small_gpt(), TOKENS, rounds=1)
    assert all(costs.weight_backward[name] > 0 for name in ("embed", "block0", "block1", "head"))
    assert costs.weight_backward["loss"] == min(costs.weight_backward.values())


def test_layers_that_are_alike_are_timed_once_and_others_by_themselves():
    ran = []

    def model():
        def layer(p, x, par):
            ran.append(len(p))
            return torch.tanh((x["x"] if isinstance(x, dict) else x) @ p)

        params = {name: fp.Param((n, 3), "out in") for name, n in (("a", 3), ("b", 3), ("c", 3))}
        loss = lambda p, x, par: ((x - par.batch["y"]).square().sum(), len(x))  # noqa: E731
        batch = {"x": fp.Input((None, 3), torch.float64), "y": fp.Input((None, 3), torch.float64)}
        return fp.Model(params, [(name, name, layer) for name in params], loss, batch)

    own = fp.compose()(model())
    ran.clear()
    costs = measure(own, {"x": (2, 3), "y": (2, 3)}, torch.float64, rounds=2)
    assert costs.forward["b"] == costs.forward["c"]
    # Traced for these shapes, then three rounds: the first layer, which reads the batch, and one for the two others.
    assert len(ran) == 2 + 3 * 2


def test_a_batch_is_given_or_drawn_within_its_range():
    model = small_gpt(vocab=5)
    batch = {name: torch.tensor([[4, 0, 1, 2]]) for name in ("tokens", "labels")}
    assert (
        measure(model, batch, rounds=1).forward.keys()
        == measure(model, dict.fromkeys(batch, (1, 4)), rounds=1).forward.keys()
    )
    floats = {"x": torch.ones(2, 3), "y": torch.ones(2)}
    assert measure(regression(), floats, torch.float64, rounds=1).saved["first"] > 0


def test_costs_of_stages_are_sums_for_the_simulator():
    plan = fp.compose(fp.stage_pp(split=[1, 2, 2]))(odd()).plan(fp.Mesh(pp=3))
    names = [layer.name for layer in odd().all_layers]
    forward, first, second = ({name: factor * 2.0**i for i, name in enumerate(names)} for factor in (1, 10, 100))
    costs = LayerCosts(forward, first, second, {})
    stages = costs.of_stages(plan, transfer=0.5)
    assert stages.forward == (1, 2 + 4, 8 + 16 + 32)
    assert stages.input_backward == (10, 60, 560)
    assert stages.weight_backward == (100, 600, 5600)
    assert stages.transfer == 0.5
    assert 0 < fp.pipeline.simulate(plan.timetable, costs.of_stages(plan)).bubble < 1


def test_ties_of_a_program_are_measured_and_its_stages_are_not():
    program = fp.compose(fp.tie("head.weight", "embed.weight"), fp.stage_pp(microbatches=2))(small_gpt())
    assert measure(program, TOKENS, rounds=1).forward["head"] > 0


def test_costs_know_what_they_were_measured_with_and_are_printed_as_a_table():
    kinds = {"x": torch.ones(2, 3), "y": (2,)}
    costs = measure(regression(), kinds, torch.float64, rounds=1)
    assert (costs.batch, costs.dtype) == ({"x": (2, 3), "y": (2,)}, torch.float64)
    assert repr(costs).startswith("LayerCosts(forward={")
    times = ({"a": 0.0015, "loss": 2.0}, {"a": 0.25, "loss": 0.0}, {"a": 0.0, "loss": 0.000_004})
    known = LayerCosts(*times, {"a": 4096, "loss": 3}, {"tokens": (2, 4), "labels": (2, 4)}, torch.bfloat16)
    head, line, *lines = str(known).split("\n")
    assert re.split("  +", head) == ["layer", "forward ms", "input-backward ms", "weight-backward ms", "saved"]
    assert set(line) == {"-", " "}
    assert [row.split() for row in lines] == [
        ["a", "1.500", "250.000", "0.000", "4.1", "kB"],
        ["loss", "2000.000", "0.000", "0.004", "3", "B"],
        ["all", "2001.500", "250.000", "0.004", "4.1", "kB"],
        [],
        ["a", "microbatch", "with", "tokens", "2", "4,", "labels", "2", "4", "in", "bfloat16"],
    ]
    assert str(LayerCosts(*times, {"a": 4096})).split("\n")[3:] == [
        "loss   2000.000    0.000              0.004               -",
        "all    2001.500    250.000            0.004               4.1 kB",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((3, TOKENS), "measure(int): give an fp.Model or a program of fp.compose."),
        (
            (odd(), {"tokens": (2, 4)}),
            "measure: the model takes the fields ['labels', 'tokens'], but the batch has ['tok",
        ),
        ((odd(), TOKENS, torch.float32, "func", 0), "measure(rounds=0): it is an integer of at least 1."),
    ],
    ids=["model", "fields", "rounds"],
)
def test_what_cannot_be_measured_is_refused(arguments, words):
    with pytest.raises(CompositionError, match=re.escape(words)):
        measure(*arguments)
