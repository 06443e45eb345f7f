"""Recording every operation changes nothing, whatever a layer does, and explains what is right."""

import pytest
import torch

import functional_par as fp
from functional_par.audit import backward, forward, leaves
from functional_par.audit.audit import on_mesh
from functional_par.audit.observe import Case, Ranks, ranks, single
from functional_par.audit.prepare import made_up_batch, parameters
from functional_par.audit.story import Story
from tests.trace.harness import model_of, program_of
from tests.trace.programs import RIGHT

MESH = fp.Mesh(dp=2, tp=3)
PROGRAMS = [
    "writes_through_a_view_of_a_buffer",
    "is_complex",
    "attends_with_few_key_heads",
    "splits_the_sequence_and_joins_it",
    "exchanges_rows_for_columns",
    "moves_around_the_ring_and_back",
    "takes_a_stable_logsumexp",
    "normalises_by_the_whole_batch",
    "scales_by_a_function_of_its_own",
    "maps_a_split_over_rows",
    "differentiates_twice",
]


def case_of(name):
    params, fn = RIGHT[name]
    plan = program_of(model_of(fn, params)).plan(MESH)
    whole = parameters(plan.model, 0)
    return Case(plan, whole, made_up_batch(plan, whole, 0)[0], 0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_layer_whose_operations_are_recorded_computes_the_same(name):
    case = case_of(name)
    deep = frozenset({"body"})
    one, many, fast = single(case, deep), ranks(case, deep, fast=False), ranks(case, deep)
    for each in (many, fast):
        assert not leaves.differences(case, one, each)
        assert not forward.wrong_outputs(case, one, each, "body")
        assert not list(backward.wrong_cotangents(case, one, each, "body"))
    for back in (False, True):
        assert backward.kernel_at_fault(many.logs["body"], fast.logs["body"], back) is None
    story = Story(one.logs["body"], many.logs["body"])
    assert story.roots([0]) == ([], [])
    assert len(story.first.nodes) > 3


def spoiled(many, path, factor):
    grads = tuple({p: x * factor if p == path else x for p, x in each.items()} for each in many.grads)
    return Ranks(many.loss, grads, many.logs)


def test_a_gradient_that_the_sums_over_ranks_spoil_is_told_by_leaf():
    case = case_of("scales_by_a_function_of_its_own")
    one, many = single(case), ranks(case)
    ((finding,), _) = on_mesh(case, one, spoiled(many, "body.g", 3.0))
    assert (finding.kind, finding.what, finding.axis) == ("n times", "body.g", "tp")
    assert "It is right in every layer; by the plan it owes dp." in finding.text
    ((finding,), _) = on_mesh(case, one, spoiled(many, "body.up", 0.0))
    assert (finding.kind, finding.what) == ("zero", "body.up")
    ((finding,), _) = on_mesh(case, one, Ranks(many.loss * torch.pi, many.grads, many.logs))
    assert (finding.kind, finding.what) == ("differs", "loss")
    assert "though the layers are right on every rank" in finding.text
