"""Is the model, in one process, the function that its author meant? Compared with a reference that they wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from functional_par import tree
from functional_par.audit import advice
from functional_par.audit.finding import Difference, Finding
from functional_par.audit.layout import close, distance
from functional_par.audit.leaves import difference, said_of_leaf
from functional_par.audit.numbers import ratio
from functional_par.audit.observe import Case, Single
from functional_par.errors import ModelError
from functional_par.program import Program

Reference = Callable[[Any, Mapping[str, Tensor]], Tensor]


def compare(
    program: Program, case: Case, single: Single, reference: Reference
) -> tuple[list[Finding], list[Difference]]:
    """What the model is not that the reference is: findings, and the leaves that differ in consequence."""
    loss, grads = _run(program, case, reference)
    truths = {path: truth for path, truth in grads.items() if truth is not None}
    wrong = [
        difference(path, single.grads[path], truth)
        for path, truth in truths.items()
        if not close(single.grads[path], truth)
    ]
    unused = [path for path, truth in grads.items() if truth is None and single.grads[path].any()]
    if (tie := _missing_tie(case, reference, program, loss, unused)) is not None:
        return [tie], wrong
    if not close(single.loss, loss):
        return [_of_loss(case, single, loss)], wrong
    findings = []
    for each in wrong:
        said = said_of_leaf(case, each.what, single.grads[each.what], truths[each.what])
        text = f"{said.text} That is: in one process, against the reference."
        findings.append(Finding(said.kind, each.what, text, advice.REFERENCE, ratio=said.ratio, largest=each.largest))
    for path in unused:
        text = f"The reference does not depend on {path}, but the model does."
        findings.append(Finding("differs", path, text, advice.REFERENCE, largest=single.grads[path].abs().max().item()))
    return findings, []


def _run(program: Program, case: Case, reference: Reference) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients of the reference; None where it does not depend on a leaf. Tied names are one tensor."""
    leaves = {p: x.clone().requires_grad_(case.plan.model.leaves[p].trainable) for p, x in case.params.items()}
    loss = reference(_named(program, case, leaves), dict(case.batch))
    if not isinstance(loss, Tensor) or loss.shape != () or not loss.requires_grad:
        shown = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ModelError(
            f"audit(reference=...): it returned {shown}. It is a function (params, batch) -> mean loss, a tensor without "
            "dims that depends on the parameters."
        )
    wanted = {path: x for path, x in leaves.items() if x.requires_grad}
    grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return loss.detach(), dict(zip(wanted, grads, strict=True))


def _named(program: Program, case: Case, leaves: Mapping[str, Tensor]) -> dict[str, Any]:
    """The leaves under all names of the model as written."""
    return tree.unflatten(case.plan.named(leaves))


def _missing_tie(case: Case, reference: Reference, program: Program, loss: Tensor, unused: list[str]) -> Finding | None:
    """Two leaves that the reference reads as one: with equal values the model is the reference."""
    leaves = case.plan.model.leaves
    pairs = [(a, b) for a, b in permutations(leaves, 2) if a in unused and leaves[a].shape == leaves[b].shape]
    for a, b in pairs:
        tied = tree.unflatten({**case.params, a: case.params[b]})
        if close(case.plan.model(tied, case.batch).detach(), loss):
            text = (
                f"The reference does not read {a}: the model is the reference if {a} is {b}. Untied, {b} lacks the gradient of "
                f"{a}, and the two drift apart."
            )
            far = distance(case.params[a], case.params[b])
            return Finding("missing tie", a, text, f'fp.tie("{a}", "{b}") among the transforms.', largest=far)
    return None


def _of_loss(case: Case, single: Single, loss: Tensor) -> Finding:
    factor, far = ratio(single.loss, loss), distance(single.loss, loss)
    for text, value in _counts(case).items():
        if factor is not None and abs(factor / value - 1) < 1e-9:
            text = f"The model's mean loss is {factor:.6g} times the reference's, {text}."
            return Finding("counts other terms", "loss", text, _COUNT, layer="loss", ratio=factor, largest=far)
    text = f"In one process the model's loss is {single.loss.item():.6g}, the reference's {loss.item():.6g}."
    return Finding("differs", "loss", text, advice.REFERENCE, layer="loss", largest=far)


def _counts(case: Case) -> dict[str, float]:
    """Quotients of the numbers by which a loss may be divided, and what they mean."""
    own = int(case.plan.model.count_terms(case.batch))
    others = {"the number of rows": case.rows}
    if (labels := case.batch.get("labels")) is not None:
        others["the number of all labels, ignored ones included"] = labels.numel()
        others["the number of labels that are not -100"] = int((labels != -100).sum())
    return {
        f"as it divides by {own} terms where the reference divides by {name}, {n}": n / own
        for name, n in others.items()
        if n != own and own
    }


_COUNT = (
    "(sum, count) so that count is the number of terms of the sum, and fp.Model(..., count=...) the same of a batch."
)
