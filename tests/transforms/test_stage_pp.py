"""Cutting the list of layers into stages."""

from __future__ import annotations

import re
from itertools import combinations, pairwise

import pytest
import torch

import functional_par as fp
from functional_par import CompositionError, Mesh, ScheduleError
from functional_par.pipeline.layer_costs import LayerCosts
from functional_par.pipeline.measure import measure
from functional_par.pipeline.memory import MemoryBound, rank_memory
from functional_par.pipeline.told import Told

from .. import oracle
from ..toys import odd, small_gpt


def test_more_stages_than_layers_are_refused():
    with pytest.raises(
        CompositionError,
        match=r"pp=8: 8 pipeline stages, but the model has only 4 layers\. Use a pp \(times chunks\) of at most 4\.",
    ):
        fp.compose(fp.stage_pp())(small_gpt(blocks=2)).plan(Mesh(pp=8))
    with pytest.raises(
        CompositionError, match=r"pp=3 \* chunks=4 = 12: 12 pipeline stages, but the model has only 9 layers"
    ):
        fp.compose(fp.stage_pp("interleaved", 3, chunks=4))(small_gpt(blocks=7)).plan(Mesh(pp=3))


@pytest.mark.parametrize("pp", [1, 2, 5, 9])
def test_stages_hold_every_layer_once_in_order(pp):
    plan = fp.compose(fp.stage_pp())(small_gpt(blocks=7)).plan(Mesh(pp=pp))
    assert [name for names in plan.stages for name in names] == [layer.name for layer in plan.model.layers]
    assert len(plan.stages) == pp
    assert all(plan.stages)
    assert plan.stage_of["loss"] == pp - 1
    assert plan.stage_layers(pp - 1)[-1] is plan.model.loss


def test_seven_blocks_lie_evenly_on_two_stages_with_head_and_loss_counted():
    plan = fp.compose(fp.stage_pp())(fp.models.gpt(512, 16, 7, 4, 16)).plan(Mesh(pp=2))
    costs = list(plan.costs.values())
    costs = [*costs[:-2], costs[-2] + costs[-1]]
    slowest = min(max(sum(costs[:cut]), sum(costs[cut:])) for cut in range(1, len(costs)))
    assert max(sum(plan.costs[layer.name] for layer in plan.stage_layers(stage)) for stage in range(2)) == slowest


def test_the_balance_that_was_measured_of_eight_blocks_and_a_large_head():
    plan = fp.compose(fp.stage_pp())(fp.models.llama(8192, 512, 8, 8, 256, d_ff=1376)).plan(Mesh(pp=2))
    assert plan.stages[1] == ("block5", "block6", "block7", "head")


def test_with_two_chunks_the_load_of_a_rank_is_what_is_evened():
    plan = fp.compose(fp.stage_pp("interleaved", microbatches=2))(small_gpt(blocks=6)).plan(Mesh(pp=2))
    assert plan.placement == (0, 1, 0, 1)
    work = [sum(plan.costs[layer.name] for layer in plan.layers_on(pp)) for pp in range(2)]
    assert max(work) - min(work) <= max(plan.costs.values())


def test_a_split_by_hand_is_kept():
    plan = fp.compose(fp.stage_pp(split=[1, 1, 2]))(small_gpt()).plan(Mesh(pp=3))
    assert plan.stages == (("embed",), ("block0",), ("block1", "head"))


def test_a_split_by_names_is_kept_as_explain_prints_it():
    split = ["embed", "block0-1", "block2 block3", ["head"]]
    plan = fp.compose(fp.stage_pp(split=split))(small_gpt(blocks=4)).plan(Mesh(pp=4))
    assert plan.stages == (("embed",), ("block0", "block1"), ("block2", "block3"), ("head",))


def test_a_name_that_no_layer_has_is_refused_when_the_plan_is_made():
    program = fp.compose(fp.stage_pp(split=["embed block0", "blok1 head"]))(small_gpt())
    with pytest.raises(CompositionError, match=re.escape("stage 1 names 'blok1', which is no layer. Is it 'block1'?")):
        program.plan(Mesh(pp=2))


def test_costs_that_are_given_move_the_cut():
    costs = {"embed": 0, "block0": 1, "block1": 1, "head": 0.5, "loss": 9.5}
    plan = fp.compose(fp.stage_pp(costs=costs))(small_gpt()).plan(Mesh(pp=2))
    assert plan.stages == (("embed", "block0", "block1"), ("head",))
    assert plan.costs == costs


def test_a_program_cut_by_measured_costs_trains_as_one_process_does():
    model, batch = small_gpt(blocks=3), oracle.token_batch(13, 4, 4)
    costs = measure(model, {"tokens": (2, 4), "labels": (2, 4)}, torch.float64, rounds=1)
    program = fp.compose(fp.stage_pp("interleaved", microbatches=2, costs=costs))(model)
    plan = program.plan(Mesh(pp=2))
    assert plan.costs == costs.total
    oracle.equal_runs(oracle.train_on(program, Mesh(pp=2), [batch] * 2).run, oracle.train(model, [batch] * 2))


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        (
            {"embed": 1},
            "costs are of the layers embed, but the model has embed, block0, block1, head, loss; they differ in b",
        ),
        (
            dict.fromkeys(["embed", "block0", "block1", "head", "loss", "x"], 1),
            "they differ in x. Give a number for each",
        ),
        (
            dict.fromkeys(["embed", "block0", "block1", "head", "loss"], -1),
            "stage_pp(costs={'embed': -1}): a cost is a finite number of at least 0.",
        ),
    ],
    ids=["missing", "unknown", "negative"],
)
def test_costs_are_numbers_for_all_layers(costs, words):
    with pytest.raises(CompositionError, match=re.escape(words)):
        fp.compose(fp.stage_pp(costs=costs))(small_gpt())


BATCH = {"tokens": (2, 4), "labels": (2, 4)}


def test_with_a_bound_of_memory_a_rank_gets_no_more_than_fits():
    model = fp.models.gpt(64, 8, 6, 4, 4, d_ff=8)  # a large embedding at one end, a large head at the other

    def plan(**options):
        transforms = (fp.stage_pp(microbatches=4, **options), fp.shard_tp())
        return fp.compose(*transforms)(model).plan(Mesh(pp=4, tp=2))

    def most(plan):
        shapes = {name: (shape, torch.int64) for name, shape in BATCH.items()}
        return max(memory.total for memory in rank_memory(plan, shapes))

    free = plan()
    bound = most(free) - 1
    tight = plan(memory=MemoryBound(bound, BATCH))
    assert tight.stages != free.stages
    assert most(tight) <= bound
    assert [name for names in tight.stages for name in names] == [layer.name for layer in model.layers]
    assert plan(memory=MemoryBound(10 * bound, BATCH)).stages == free.stages
    with pytest.raises(
        CompositionError, match=r"no split of 8 layers on 4 stages fits into 0.000001 GB a rank: the one"
    ):
        plan(memory=MemoryBound(1000, BATCH))
    with pytest.raises(
        CompositionError, match=r"the ranks at pp=0 with stage 0 \(embed block0 block1\) need [0-9.]+ GB"
    ):
        plan(memory=MemoryBound(1000, BATCH), split=[3, 2, 2, 1])


@pytest.mark.parametrize("memory", [25_000_000, 2.5e7, MemoryBound(2.5e7, slots=0)], ids=["int", "float", "bound"])
@pytest.mark.parametrize("costs", [False, True], ids=["counted", "by_hand"])
@pytest.mark.parametrize("model", [small_gpt, odd])
def test_a_bound_of_memory_counts_no_rows_that_nobody_said(memory, costs, model):
    sizes = (4, 4) if model is small_gpt else (4, 1024)
    fix = (
        f"Give them, such as memory=fp.MemoryBound(25000000, batch={{'tokens': {sizes}, 'labels': {sizes}}}), or costs="
    )
    each = {layer.name: 1.0 for layer in model().all_layers}
    with pytest.raises(CompositionError, match=re.escape(fix)) as caught:
        fp.compose(fp.stage_pp(memory=memory, costs=LayerCosts(each, each, each, {}) if costs else None))(model())
    assert "stage_pp(memory=25000000): what a stage keeps goes by the rows and sizes" in str(caught.value)
    given = "tokens [None, 4]" if model is small_gpt else "tokens [None, None]"
    assert f"which the model leaves open ({given}, labels" in str(caught.value)


def test_a_number_of_bytes_is_of_the_rows_and_the_dtype_that_were_measured():
    model = small_gpt(blocks=4)
    costs = measure(model, {name: torch.zeros(64, 4, dtype=torch.int64) for name in BATCH}, torch.float64, rounds=1)
    free = fp.compose(fp.stage_pp(microbatches=4, costs=costs))(model).plan(Mesh(pp=2))
    most = {}
    for rows in (1, 64):
        fields = dict.fromkeys(BATCH, ((rows, 4), torch.int64))
        most[rows] = max(memory.total for memory in rank_memory(free, fields, torch.float64))
    assert most[64] > 8 * most[1]
    for memory in (most[64], MemoryBound(most[64], dtype=torch.float64)):
        plan = fp.compose(fp.stage_pp(microbatches=4, costs=costs, memory=memory))(model).plan(Mesh(pp=2))
        assert plan.stages == free.stages
        assert plan.told == Told(dict.fromkeys(BATCH, (64, 4)), torch.float64)
    for split in (None, [len(names) for names in free.stages]):
        with pytest.raises(
            CompositionError, match=r"no split of 6 layers on 2 stages fits|the ranks at pp=[01] with stage [01]"
        ):
            fp.compose(fp.stage_pp(microbatches=4, costs=costs, memory=most[64] // 8, split=split))(model).plan(
                Mesh(pp=2)
            )
    own = MemoryBound(most[64] // 8, dict.fromkeys(BATCH, (1, 4)), torch.float64)
    assert (
        fp.compose(fp.stage_pp(microbatches=4, costs=costs, memory=own))(model).plan(Mesh(pp=2)).told.batch == own.batch
    )


def test_a_number_of_bytes_is_enough_for_a_model_that_fixes_its_rows():
    read = lambda p, batch, par: batch["x"] @ p  # noqa: E731
    loss = lambda p, x, par: (x.square().sum(), torch.tensor(len(x)))  # noqa: E731
    params = {name: fp.Param((3, 3), "in out") for name in "ab"}
    layers = [("a", "a", read), ("b", "b", lambda p, x, par: torch.tanh(x @ p))]
    model = fp.Model(params, layers, loss, {"x": fp.Input((500, 3), torch.float32)})
    assert fp.compose(fp.stage_pp(memory=1e6))(model).plan(Mesh(pp=2)).told == Told({"x": (500, 3)})
    with pytest.raises(CompositionError, match=r"no split of 2 layers on 2 stages fits into 0\.000005 GB"):
        fp.compose(fp.stage_pp(memory=5000))(model).plan(Mesh(pp=2))


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"tokens": (1, 4)}, "the model takes the fields ['labels', 'tokens'], but the batch has ['tokens']."),
        (
            {"tokens": (1, 4), "labels": (4,)},
            "'labels' has the shape [4], but the model takes [None, 4], where None is any positive size.",
        ),
        ({"tokens": (1, 5), "labels": (1, 5)}, "'tokens' has the shape [1, 5], but the model takes [None, 4]"),
        ({"tokens": (0, 4), "labels": (0, 4)}, "'tokens' has the shape [0, 4], but the model takes [None, 4]"),
        (
            {"tokens": (1, 4), "labels": (2, 4)},
            "the fields of a microbatch have one number of rows, but these are tokens [1, 4], labels [2, 4].",
        ),
    ],
    ids=["fields", "dims", "size", "empty", "rows"],
)
def test_shapes_of_a_microbatch_are_those_that_the_model_takes(batch, words):
    model = small_gpt()
    each = {layer.name: 1.0 for layer in model.all_layers}
    costs = LayerCosts(each, each, each, {}, batch)
    for asked, told in (
        ("MemoryBound(batch=...)", lambda: fp.compose(fp.stage_pp(memory=MemoryBound(1e9, batch)))(model)),
        ("stage_pp(costs=...)", lambda: fp.compose(fp.stage_pp(costs=costs))(model)),
        ("measure", lambda: measure(model, batch)),
        ("explain(batch=...)", lambda: fp.compose()(model).explain(Mesh(), batch)),
    ):
        with pytest.raises(CompositionError, match=re.escape(f"{asked}: {words}")):
            told()


def test_a_split_by_hand_is_not_used_without_pp():
    assert len(fp.compose(fp.stage_pp(split=[1, 1, 2]))(small_gpt()).plan(Mesh()).stages) == 1


def test_a_stage_without_parameters_holds_nothing():
    plan = fp.compose(fp.stage_pp(split=[1, 1, 3]))(odd()).plan(Mesh(pp=3))
    assert plan.stages[1] == ("mask",)
    assert plan.stage_leaves(1) == ()
    assert plan.specs["temperature"].owners == (2,)


@pytest.mark.parametrize(("split", "pp"), [([1, 3], 3), ([1, 1, 1], 3), ([2, 2, 2], 3), ([4], 2)])
def test_a_split_that_does_not_fit_is_refused_with_both_counts(split, pp):
    message = (
        f"stage_pp(split={split}): {len(split)} stages with {sum(split)} layers in all, but Mesh(pp={pp}) has pp={pp} with "
        f"{pp} stages under zb-2p, and the model has 4 layers (embed, block0, block1, head)."
    )
    with pytest.raises(CompositionError, match=re.escape(message)):
        fp.compose(fp.stage_pp(split=split))(small_gpt()).plan(Mesh(pp=pp))


@pytest.mark.parametrize("split", [[0, 4], [2, -1], [1.0, 3], [True, 3]])
def test_a_stage_gets_at_least_one_layer(split):
    message = f"stage_pp(split={split}): each stage gets an integer number of layers, at least 1."
    with pytest.raises(CompositionError, match=re.escape(message)):
        fp.stage_pp(split=split)


def test_a_split_is_a_list():
    with pytest.raises(
        CompositionError, match=re.escape("stage_pp(split=3): it is a list with the number of layers of each")
    ):
        fp.stage_pp(split=3)


@pytest.mark.parametrize("microbatches", [0, -1, 1.0, True, "2", None])
def test_microbatches_are_a_positive_integer(microbatches):
    message = f"stage_pp(microbatches={microbatches!r}): it is an integer of at least 1."
    with pytest.raises(CompositionError, match=re.escape(message)):
        fp.stage_pp(microbatches=microbatches)


@pytest.mark.parametrize("schedule", ["gpip", "zb", ""])
def test_an_unknown_schedule_is_refused_with_those_there_are(schedule):
    with pytest.raises(ScheduleError, match=r"afab, 1f1b, interleaved"):
        fp.stage_pp(schedule=schedule)


@pytest.mark.parametrize("schedule", [3, ["0F0"]])
def test_a_schedule_is_a_name_a_file_a_schedule_or_a_function(schedule):
    message = f"stage_pp(schedule={schedule!r}): a name, a path to a CSV file, an fp.pipeline.Schedule, or a function"
    with pytest.raises(CompositionError, match=re.escape(message)):
        fp.stage_pp(schedule=schedule)


def towers(sizes):
    """Layers of several widths; the first and the last share a leaf, and so do two that follow each other. The loss keeps a
    tensor too."""

    def layer(p, x, par):
        x = x["x"] if isinstance(x, dict) else x
        return x + torch.tanh(x @ p["up"].T) @ p["up"]

    read = {2: 1, len(sizes) - 1: 0}
    params = {f"w{i}": {"up": fp.Param((n, 6), "wide narrow")} for i, n in enumerate(sizes) if i not in read}
    layers = [(f"layer{i}", f"w{read.get(i, i)}", layer) for i in range(len(sizes))]
    batch = {"x": fp.Input((None, 6), torch.float64), "y": fp.Input((None, 6), torch.float64)}
    return fp.Model(
        params, layers, lambda p, x, par: ((x - par.batch["y"]).square().sum(), torch.tensor(len(x))), batch
    )


@pytest.mark.parametrize(("schedule", "pp"), [("1f1b", 3), ("zbv", 2)])
def test_the_tightest_bound_that_any_split_meets_is_met_and_a_byte_less_is_refused(schedule, pp):
    model, stages = towers((40, 30, 0, 7, 20, 0)), 3 if schedule == "1f1b" else 4
    shapes = dict.fromkeys(("x", "y"), ((8, 6), torch.bfloat16))

    def plan(**options):
        return fp.compose(fp.stage_pp(schedule, microbatches=3, **options))(model).plan(Mesh(pp=pp))

    def within(room):
        return plan(memory=MemoryBound(room, dict.fromkeys(shapes, (8, 6)), torch.bfloat16, slots=1))

    def most(plan):
        return max(memory.total for memory in rank_memory(plan, shapes, torch.bfloat16, 1))

    splits = [tuple(b - a for a, b in pairwise((0, *cuts, 6))) for cuts in combinations(range(1, 6), stages - 1)]
    best = min(most(plan(split=split)) for split in splits)
    # Two stages of a rank are counted as if they were fullest at the same time, which they need not be.
    spare = 0 if schedule == "1f1b" else best
    assert most(within(best + spare)) <= best + spare
    with pytest.raises(CompositionError, match=f"no split of 6 layers on {stages} stages fits into"):
        within(best - 1)
