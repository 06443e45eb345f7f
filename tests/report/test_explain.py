"""``explain`` names every leaf once, with its spec, what it owes, who pays, and the bytes."""

import functools
from math import prod

import pytest
import torch

import functional_par as fp
from functional_par.buckets import buckets, slices
from functional_par.pipeline.memory import rank_memory
from functional_par.plan import Plan
from functional_par.report.text import braces, collapse, ranges, size
from functional_par.traffic import step_traffic

from ..toys import small_gpt

MESHES = [fp.Mesh(), fp.Mesh(dp=2), fp.Mesh(tp=2), fp.Mesh(pp=2), fp.Mesh(dp=2, pp=2, tp=2)]


@functools.cache
def program(mode: str = "REDUCE_SCATTER") -> fp.Program:
    model = fp.models.gpt(vocab=33, d_model=16, n_layers=4, n_heads=4, seq_len=8)
    tie = fp.tie("head.weight", "embed.weight")
    return fp.compose(tie, fp.shard_tp(mode=mode), fp.stage_pp(microbatches=2), fp.dp_reduce())(model)


def expand(name: str) -> list[str]:
    """The paths that a collapsed name stands for."""
    parts = [""]
    for component in name.split("."):
        options = component.strip("{}").split(",")
        if "-" in component and component.replace("-", "").replace(",", "").isdigit():
            options = [str(n) for part in options for n in numbers(part)]
        parts = [f"{part}.{option}".lstrip(".") for part in parts for option in options]
    return parts


def numbers(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def rows(plan_text: str) -> list[list[str]]:
    """Cells of the table of leaves."""
    table = next(part for part in plan_text.split("\n\n") if part.startswith("leaf"))
    head, _, *lines = table.split("\n")
    starts = [head.index(name) for name in ("leaf", "spec", "local shape", "stages", "owes", "paid by")]
    return [[line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)] for line in lines]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_leaf_is_in_one_row_with_its_spec_and_what_it_owes(mesh: fp.Mesh) -> None:
    plan: Plan = program().plan(mesh)
    seen = []
    for name, spec, shape, stages, owes, paid in rows(str(program().explain(mesh))):
        for path in expand(name):
            seen.append(path)
            leaf = plan.specs[path]
            assert (spec, shape, stages) == (
                str(leaf),
                *(" ".join(map(str, v)) for v in (leaf.local_shape(mesh), plan.readers[path])),
            )
            owed = [debt.axis for debt in leaf.owes if getattr(mesh, debt.axis) > 1]
            assert sorted(word.split("[")[0] for word in owes.split()) == (sorted(owed) or ["nothing"])
            assert paid == (
                "-" if not owed else f"all_reduce {'+'.join(owed)}, {size(4 * prod(leaf.local_shape(mesh)))}"
            )
    assert sorted(seen) == sorted(plan.specs)


def test_every_group_that_reduces_is_listed_with_its_bytes() -> None:
    mesh = fp.Mesh(dp=2, pp=2, tp=2)
    plan, text = program().plan(mesh), str(program().explain(mesh))
    table = text.split("\n\n")[-1]
    for rank in range(mesh.size):
        for bucket in buckets(plan, rank):
            assert "{" + ranges(bucket.ranks) + "}" in table
            assert size(4 * bucket.elements) in table


def test_one_line_says_what_the_rank_that_sends_most_sends_in_a_step() -> None:
    mesh = fp.Mesh(dp=2, pp=2, tp=2)
    plan, batch = program().plan(mesh), {"tokens": (3, 8), "labels": (3, 8)}
    fields = {name: (shape, torch.int64) for name, shape in batch.items()}
    flows = max((step_traffic(plan, rank, fields) for rank in (0, 4)), key=lambda found: found.sent).flows
    line = next(line for line in str(program().explain(mesh, batch)).splitlines() if line.startswith("sent in a step"))
    assert f"at most {size(sum(flow.sent for flow in flows.values()))} a rank" in line
    assert f"tp {size(sum(flow.sent for (_, label, _), flow in flows.items() if label == 'tp'))}" in line
    numbers = sum(flow.sent for (phase, _, _), flow in flows.items() if phase in ("count", "metrics"))
    assert f"loss and norm {size(numbers)}" in line
    assert "maps of your own" not in line
    mapped = fp.compose(fp.dp_reduce(), fp.on_local_gradients(lambda grad, leaf: grad))(program().source)
    assert "maps of your own" in str(mapped.explain(fp.Mesh(dp=2)))
    assert "sent in a step" not in str(program().explain(fp.Mesh()))


def test_each_reason_is_a_numbered_line_of_source() -> None:
    text = str(program().explain(fp.Mesh(dp=2, tp=2)))
    assert "[1] dp: meets data that differ along dp at models/gpt.py:" in text
    assert "(in fp.nn.embedding): `x = embedding(tokens" in text


def test_a_tie_over_stages_says_so() -> None:
    text = str(program().explain(fp.Mesh(pp=2)))
    assert "tied              embed.weight = head.weight" in text
    assert "pp: tied: read on stages 0, 1" in text


def test_one_rank_reduces_nothing() -> None:
    assert str(program().explain(fp.Mesh())).endswith("no gradient is reduced")


def test_names_collapse_without_losing_any() -> None:
    assert collapse(["embed", "block0", "block1", "block3", "head"]) == "embed block0-1,3 head"
    assert braces(["a.x.w", "a.y.w", "b"]) == ["a.{x,y}.w", "b"]
    assert braces(["a.0.w", "a.1.w", "a.0.v"]) == ["a.0.{w,v}", "a.1.w"]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_ranks_share_out_is_said_with_the_part_of_each(zero: int) -> None:
    mesh = fp.Mesh(dp=2, pp=2, tp=2)
    tie, shard = fp.tie("head.weight", "embed.weight"), fp.shard_tp("REDUCE_SCATTER")
    made = fp.compose(tie, shard, fp.stage_pp(), fp.dp_reduce(zero=zero))(small_gpt())
    plan, text = made.plan(mesh), str(made.explain(mesh))
    assert f"zero={zero}" in text
    table = text.split("\n\n")[-1]
    for rank in range(mesh.size):
        for bucket in buckets(plan, rank):
            assert "{" + ranges(bucket.ranks) + "}" in table
            assert size(4 * bucket.part) in table
    rows = {line.split("  ")[0]: " ".join(line.split()) for line in text.splitlines()}
    assert rows["embed.weight"].endswith("reduce_scatter dp, 224 B; then all_reduce pp of the slice")
    assert rows["blocks.0.mlp.up.weight"].endswith("dp[8] reduce_scatter dp, 128 B")
    memory = rank_memory(plan)
    assert ("In passing there are" in text) == (zero > 1)
    for pp in range(mesh.pp):
        held = memory[pp].parameters + memory[pp].gradients + memory[pp].state
        assert size(held) in text
        kept = slices(plan, mesh.rank(pp=pp)) if zero == 3 else {}
        shards = {path: prod(plan.specs[path].local_shape(mesh)) for path in plan.held(pp)}
        own = sum(kept[path].elements if path in kept else n for path, n in shards.items())
        assert memory[pp].parameters == 4 * own
