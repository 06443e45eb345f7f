"""``audit``: is a program on a mesh the single-process function of its model, and if not, what is wrong with it?"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from functional_par.audit import advice, backward, derivative, forward, leaves
from functional_par.audit import reference as references
from functional_par.audit.finding import Audit, Difference, Finding
from functional_par.audit.layout import TOLERANCE
from functional_par.audit.observe import Case, Ranks, Single, ranks, single
from functional_par.audit.prepare import check_size, check_work, given_batch, made_up_batch, parameters
from functional_par.audit.rules import Said
from functional_par.errors import CompositionError
from functional_par.mesh import Mesh
from functional_par.plan import Plan
from functional_par.program import Program
from functional_par.transforms.own import OwnMap


def audit(
    program: Program,
    mesh: Mesh,
    batch: Mapping[str, Tensor] | None = None,
    *,
    reference: Callable[[Any, Mapping[str, Tensor]], Tensor] | None = None,
    seed: int = 0,
    derivatives: bool = True,
) -> Audit:
    """Run a program on the ranks of a mesh, as threads in float64, and compare it with the plain function of its model in one
    process: every layer's values and cotangents, the loss, and every gradient on every rank, to 1e-10.

    The trace proves that gradients are those of the function that the ranks compute. That this function is the model's, no
    type can tell: a bias inside the sum, a mean over a dim that is cut, a kernel that is not its definition. An audit finds
    it by the numbers, and says what kind of wrong, in which layer and line, and what to write.

    Args:
        program: from ``fp.compose``.
        mesh: any mesh that the program has a plan for; a few ranks show what many would.
        batch: a global batch: dict of tensors with all rows in dim 0. By default one is made up from ``fp.Model(batch=...)``,
            with two rows a microbatch and uneven labels.
        reference: the author's own ``(params, batch) -> mean loss``, a tensor without dims, where there is one: the model in
            one process is compared with it too. ``params`` is the nested dict of all leaves of the model.
        seed: of parameters (initial values plus noise, so that no leaf is zero), batch and dropout.
        derivatives: whether to compare the backward of layers that bring an ``autograd.Function`` with finite differences.

    Raises:
        ParallelError: what the plan raises, which is a diagnosis by itself; a model or batch too large to be run small.

    >>> import functional_par as fp
    >>> model = fp.models.gpt(vocab=11, d_model=8, n_layers=1, n_heads=2, seq_len=4)
    >>> fp.audit(fp.compose(fp.shard_tp())(model), fp.Mesh(tp=2)).ok
    True
    """
    began = time.monotonic()
    if not isinstance(program, Program):
        raise CompositionError(
            f"audit({type(program).__name__}, mesh): the first argument is a program, from fp.compose."
        )
    program.plan(mesh)
    own, notes = _without_maps(program)
    case, more = _case(own, mesh, batch, seed)
    one, many = single(case), ranks(case)
    findings: list[Finding] = derivative.findings(case, one) if derivatives else []
    consequences: list[Difference] = []
    if reference is not None:
        found, following = references.compare(own, case, one, reference)
        findings, consequences = findings + found, consequences + following
    found, wrong = on_mesh(case, one, many)
    findings += found
    told = dict.fromkeys([*consequences, *wrong])
    return Audit(
        mesh,
        tuple(findings),
        tuple(each for each in told if each.what not in [finding.what for finding in findings]),
        _compared(case, one),
        tuple(notes + more),
        time.monotonic() - began,
    )


def _case(program: Program, mesh: Mesh, batch: Mapping[str, Tensor] | None, seed: int) -> tuple[Case, list[str]]:
    """What is run, and notes on what was made up."""
    plan = program.plan(mesh)
    check_size(plan.model)
    given = None if batch is None else given_batch(batch)
    check_work(plan, given)
    params = parameters(plan.model, seed)
    own, notes = made_up_batch(plan, params, seed) if given is None else (given, [])
    case = Case(plan, params, own, seed)
    return replace(case, guilty=lambda axis: _goes_wrong_along(program, case, axis)), notes


def _goes_wrong_along(program: Program, case: Case, axis: str) -> bool:
    """Whether loss or gradients differ on the mesh that has this axis alone."""
    sizes = {} if axis == "microbatches" else {axis: getattr(case.plan.mesh, axis)}
    plan = program.plan(Mesh(**sizes))
    own = replace(case, plan=plan if axis == "microbatches" else replace(plan, microbatches=1))
    return bool(leaves.differences(own, single(own), ranks(own)))


def _without_maps(program: Program) -> tuple[Program, list[str]]:
    """The program without the user's maps on gradients and updates, which may be approximate on purpose."""
    kept = tuple(each for each in program.transforms if not isinstance(each, OwnMap))
    left = [each.map.name for each in program.transforms if isinstance(each, OwnMap)]
    if not left:
        return program, []
    return Program(program.source, kept), [f"left out, since they may be approximate on purpose: {', '.join(left)}"]


def on_mesh(case: Case, one: Single, many: Ranks) -> tuple[list[Finding], tuple[Difference, ...]]:
    """What is wrong on the ranks, and the loss and gradients that follow from it."""
    if not (wrong := leaves.differences(case, one, many)):
        return [], ()
    if (layer := forward.first_wrong(case, one, many)) is not None:
        return [_forward(case, layer)], wrong
    if (found := backward.first_wrong(case, one, many)) is not None:
        return [_backward(case, *found)], wrong
    return [leaves.diagnose(case, one, many, each) for each in wrong], ()


def _forward(case: Case, layer: str) -> Finding:
    """Run once more, and record every operation of the layer."""
    deep = frozenset({layer})
    one, by_definition, fast = single(case, deep), ranks(case, deep, fast=False), ranks(case, deep)
    kernel = backward.kernel_at_fault(by_definition.logs[layer], fast.logs[layer], backward=False)
    if kernel is None:
        return forward.diagnose(case, one, by_definition, layer)
    call, far = kernel
    text = f"The fast form of the {call.name} gives other values than its definition."
    return forward.make_finding(case, layer, Said("kernel", text, advice.KERNEL), far, str(call.place))


def _backward(case: Case, layer: str, wrong: list[backward.Wrong]) -> Finding:
    deep = frozenset({layer})
    one, by_definition, fast = single(case, deep), ranks(case, deep, fast=False), ranks(case, deep)
    return backward.diagnose(case, one, by_definition, fast, layer, wrong)


def _compared(case: Case, one: Single) -> str:
    plan: Plan = case.plan
    return (
        f"loss, {len(one.grads)} gradients, values and cotangents of {len(one.logs)} layers with one process, to "
        f"{TOLERANCE:.0e}, on {case.rows} rows in {case.pieces} pieces ({plan.replicas} replicas * {plan.microbatches} "
        "microbatches)"
    )
