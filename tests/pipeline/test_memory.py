"""Memory of stages and ranks, counted."""

from __future__ import annotations

import re
from math import prod

import pytest
import torch

import functional_par as fp
from functional_par.errors import CompositionError
from functional_par.pipeline.memory import MemoryBound, live_microbatches, rank_memory, stage_memory
from functional_par.pipeline.schedule import Schedule

from ..toys import odd, small_gpt

BATCH = dict.fromkeys(("tokens", "labels"), ((3, 4), torch.int64))


def test_a_microbatch_lives_from_its_forward_to_the_end_of_its_backward():
    schedule = Schedule.of(
        "mine",
        [
            ["0F0", "0F1", "3F0", "3I0", "0F2", "3W0", "0B0", "0B1", "0B2"],
            ["1F0", "2F0", "2B0", "1B0"],
        ],
    )
    assert live_microbatches(schedule) == (3, 1, 1, 1)


@pytest.mark.parametrize(("schedule", "live"), [("1f1b", (3, 2, 1)), ("afab", (4, 4, 4))])
def test_a_stage_needs_its_leaves_and_what_its_layers_keep_for_each_live_microbatch(schedule, live):
    plan = fp.compose(fp.stage_pp(schedule, microbatches=4, split=[1, 2, 2]))(odd(trainable_scale=False)).plan(
        fp.Mesh(pp=3)
    )
    layers = plan.trace(BATCH, torch.bfloat16).layers
    for dtype, wide in ((torch.bfloat16, 4), (torch.float64, 8)):
        layers = plan.trace(BATCH, dtype).layers
        for stage, memory in enumerate(stage_memory(plan, BATCH, dtype)):
            held = {path: prod(plan.specs[path].shape) for path in plan.stage_leaves(stage)}
            trained = sum(n for path, n in held.items() if plan.specs[path].trainable)
            assert memory.parameters == dtype.itemsize * sum(held.values())
            assert memory.gradients == wide * trained
            assert memory.state == (2 + (dtype is torch.bfloat16)) * wide * trained  # with the master copy
            assert memory.live == live[stage]
            assert memory.saved == sum(layers[layer.name].saved for layer in plan.stage_layers(stage))
            assert memory.activations == memory.saved * memory.live
            assert memory.total == memory.parameters + memory.gradients + memory.state + memory.activations
    assert stage_memory(plan, BATCH) == rank_memory(plan, BATCH)


def test_the_state_is_that_of_the_optimizer_and_the_activations_those_that_were_measured():
    plan = fp.compose(fp.stage_pp(split=[2, 3]))(odd()).plan(fp.Mesh(pp=2))
    assert [memory.state for memory in stage_memory(plan, BATCH, optimizer=fp.optim.sgd(0.1))] == [0, 0]
    saved = {layer.name: 10**i for i, layer in enumerate(odd().all_layers)}
    assert [memory.saved for memory in stage_memory(plan, BATCH, saved=saved)] == [11, 111100]


def test_a_rank_holds_a_leaf_once_that_its_stages_share():
    tied = fp.compose(fp.tie("head.weight", "embed.weight"), fp.stage_pp("zbv", microbatches=2))(small_gpt(blocks=4))
    plan = tied.plan(fp.Mesh(pp=2))
    stages, ranks = stage_memory(plan, BATCH), rank_memory(plan, BATCH)
    assert plan.placement == (0, 1, 1, 0)
    shared = 4 * prod(plan.specs["embed.weight"].shape)
    assert ranks[0].parameters == stages[0].parameters + stages[3].parameters - shared
    assert ranks[1].parameters == stages[1].parameters + stages[2].parameters
    assert all(
        ranks[at].activations <= stages[a].activations + stages[b].activations for at, a, b in ((0, 0, 3), (1, 1, 2))
    )


@pytest.mark.parametrize("room", [0, -1.0, float("inf"), True, "16 GB"])
def test_a_bound_is_a_positive_number_of_bytes(room):
    with pytest.raises(
        CompositionError, match=re.escape(f"MemoryBound(bytes={room!r}): it is a positive number of bytes a")
    ):
        MemoryBound(room)


@pytest.mark.parametrize("slots", [-1, 1.0, True])
def test_the_optimizer_keeps_a_number_of_tensors(slots):
    with pytest.raises(
        CompositionError, match=re.escape(f"MemoryBound(slots={slots!r}): it is a number of tensors a leaf")
    ):
        MemoryBound(1e9, slots=slots)
