"""Two witnesses agree: what the trace accepts and refuses, spmd-types accepts and refuses, but for what is listed here."""

import pytest
import torch
from hypothesis import given, note, settings

import functional_par as fp
from functional_par.errors import ModelError, TraceError
from tests.trace import free, witness
from tests.trace.draws import programs
from tests.trace.harness import batch_of, model_of, total
from tests.trace.joint import arranged
from tests.trace.programs import RIGHT, table
from tests.trace.test_refused import REFUSED
from tests.trace.truth import transforms_of

TP, DP_TP = fp.Mesh(tp=2), fp.Mesh(dp=2, tp=2)

FUNC = "its Functions do not run under torch.func"
OWN = "it takes no autograd.Function that is not registered with it"

REFUSED_BY_IT = {
    "makes_tensors_of_numbers": "it does not know that torch.as_tensor makes the same of a number on every rank",
    "has_a_function_of_its_own": OWN,
    "scales_by_a_function_of_its_own": OWN,
    "maps_over_rows": FUNC,
    "maps_a_split_over_rows": FUNC,
    "differentiates_an_energy": FUNC,
    "differentiates_twice": FUNC,
    "pulls_back_inside": FUNC,
}
"""Right programs that the witness cannot follow, and why. The joint function or the plain one says that they are right."""

ACCEPTED_BY_IT = {
    "split_written_behind_the_derivative": "it types names, not memory: a write through detach() is lost, so its losses differ",
    "hook_that_sums": "it looks at the forward alone, and the fault is in the backward",
}
"""Wrong layers that the witness lets pass, and why."""

NO_NEW_TYPE = "in-place/out operation would change SPMD type"
"""A write of what differs into a buffer that holds a leaf is refused by it, whatever the leaf owes; ours follows the memory,
and the joint function says that it is right."""

WRONG = {fn.__name__: (params, fn) for error, _, params, fn in REFUSED if issubclass(error, TraceError)}

few = settings(max_examples=max(1, settings.default.max_examples // 2))


@pytest.fixture(scope="module", params=[TP, DP_TP], ids=["tp2", "dp2_tp2"])
def ranks(request):
    table.cache_clear()  # its types of another mesh stay on a tensor
    with witness.ranks_of(request.param) as groups:
        yield request.param, groups


def verdicts(make, mesh, groups):
    """(what the trace has against a model, what spmd-types has)"""
    model = make(False)
    plan, batch = arranged(model, mesh, transforms_of(mesh)), batch_of(model, rows=mesh.dp)
    try:
        owes = {path: frozenset(debt.axis for debt in spec.owes) for path, spec in plan.finish().specs.items()}
    except TraceError as error:
        return str(error), witness.always_refused(lambda: make(True), plan, batch, groups)
    return "", witness.refusal(model, plan, batch, owes, groups)


@pytest.mark.parametrize("name", sorted(set(RIGHT) - {name for name, why in REFUSED_BY_IT.items() if why == FUNC}))
def test_the_witness_accepts_what_is_right(name, ranks):
    params, fn = RIGHT[name]
    ours, theirs = verdicts(lambda _: model_of(fn, params), *ranks)
    assert ours == ""
    assert bool(theirs) == (name in REFUSED_BY_IT), theirs


@pytest.mark.parametrize("name", [name for name, why in REFUSED_BY_IT.items() if why == FUNC])
def test_the_witness_cannot_run_under_torch_func(name, ranks):
    params, fn = RIGHT[name]
    with pytest.raises(RuntimeError, match="setup_context"):
        verdicts(lambda _: model_of(fn, params), *ranks)


def beside(fn):
    """The layer, which hands on what it got as another reader of it would."""
    return lambda p, x, par: {"x": x, "y": fn(p, x, par)}


def total_of_both(p, x, par):
    return total(p, x["x"], par)[0] + total(p, x["y"], par)[0], len(par.batch["x"])


@pytest.mark.parametrize("name", WRONG)
def test_the_witness_refuses_what_is_wrong(name, ranks):
    params, fn = WRONG[name]
    if name == "no_pvary_inside_vmap":
        with pytest.raises(RuntimeError, match="setup_context"):
            verdicts(lambda _: model_of(fn, params), *ranks)
        return
    ours, theirs = verdicts(lambda _: model_of(beside(fn), params, total_of_both), *ranks)
    if "of dp" in ours or not ours:
        # On a mesh without dp nothing is wrong with a layer whose fault lies there.
        assert (ranks[0] is DP_TP) == bool(ours)
    assert bool(theirs) == (bool(ours) and name not in ACCEPTED_BY_IT), theirs


@few
@given(programs(("tp",)))
def free_over_tp(groups, program):
    agree(program, TP, groups)


@few
@given(programs(("dp", "tp")))
def free_over_dp_and_tp(groups, program):
    agree(program, DP_TP, groups)


def agree(program, mesh, groups):
    def make(beside):
        return free.model_of(program, free.Anchors(whole_only=True) if beside else None)

    try:
        ours, theirs = verdicts(make, mesh, groups)
    except ModelError:
        return  # the loss does not depend on any parameter
    note(f"ours: {ours}\ntheirs: {theirs}")
    assert bool(ours) == bool(theirs) or (not ours and NO_NEW_TYPE in theirs)


def test_the_witnesses_agree_on_free_programs(ranks):
    mesh, groups = ranks
    (free_over_tp if mesh is TP else free_over_dp_and_tp)(groups)


def test_a_leaf_that_owes_less_than_it_should_is_refused_by_the_witness(ranks):
    mesh, groups = ranks
    params, fn = RIGHT["scales_partial_sums"]
    model = model_of(fn, params)
    plan = arranged(model, mesh, transforms_of(mesh))
    owes = {path: frozenset(debt.axis for debt in spec.owes) for path, spec in plan.finish().specs.items()}
    assert owes["body.g"] == {"tp"} | ({"dp"} if mesh is DP_TP else set())
    batch = batch_of(model, rows=mesh.dp)
    assert witness.refusal(model, plan, batch, owes, groups) == ""
    for axis in owes["body.g"]:
        less = {**owes, "body.g": owes["body.g"] - {axis}}
        assert "Invariant type" in witness.refusal(model, plan, batch, less, groups)
    more = {**owes, "enter.w": owes["enter.w"] | {"tp"}}
    assert "expected input type" in witness.refusal(model, plan, batch, more, groups)
    assert torch.is_grad_enabled()
