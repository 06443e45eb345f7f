"""Loss and gradients after all sums, on every rank: the promise that everything else serves."""

from __future__ import annotations

import torch
from torch import Tensor

from functional_par.audit import advice
from functional_par.audit.backward import classify
from functional_par.audit.finding import Difference, Finding
from functional_par.audit.layout import Grid, close, distance
from functional_par.audit.numbers import ratio
from functional_par.audit.observe import Case, Ranks, Single
from functional_par.audit.rules import Said
from functional_par.shards import cut


def differences(case: Case, single: Single, ranks: Ranks) -> tuple[Difference, ...]:
    """The loss and every leaf whose gradient differs on some rank, with the rank where it is farthest."""
    found = [] if close(ranks.loss, single.loss) else [difference("loss", ranks.loss, single.loss)]
    for path, truth in single.grads.items():
        worst: Difference | None = None
        for rank, grads in enumerate(ranks.grads):
            if path in grads:
                want = cut(case.plan, case.plan.specs[path], truth, rank)
                if not close(grads[path], want, [[truth]]):
                    here = difference(path, grads[path], want)
                    worst = here if worst is None or here.largest > worst.largest else worst
        found += [] if worst is None else [worst]
    return tuple(found)


def difference(what: str, value: Tensor, truth: Tensor) -> Difference:
    """How two values differ."""
    return Difference(what, distance(value, truth), ratio(value, truth))


def diagnose(case: Case, single: Single, ranks: Ranks, wrong: Difference) -> Finding:
    """A gradient that is right in every layer and wrong after the sums over ranks."""
    path = wrong.what
    if path == "loss":
        text = "The mean loss is not that of one process, though the layers are right on every rank."
        return Finding("differs", "loss", text, advice.LEAF, ratio=wrong.ratio, largest=wrong.largest)
    truth, spec = single.grads[path], case.plan.specs[path]
    said = _of_stages(case, single, ranks, path) or classify(
        case, truth, _grid(case, ranks, path), "tp" not in spec.sharded, f"The gradient of {path} is"
    )
    owes = ", ".join(debt.axis for debt in spec.owes if getattr(case.plan.mesh, debt.axis) > 1) or "nothing"
    text = f"{said.text} It is right in every layer; by the plan it owes {owes}."
    return Finding(said.kind, path, text, advice.LEAF, axis=said.axis, ratio=said.ratio, largest=wrong.largest)


def _of_stages(case: Case, single: Single, ranks: Ranks, path: str) -> Said | None:
    """A leaf that several stages read, of which each has the gradient of its own layers alone."""
    plan = case.plan
    spec = plan.specs[path]
    for rank, grads in enumerate(ranks.grads):
        if len(spec.owners) > 1 and path in grads:
            own = [layer.name for layer in plan.layers_on(plan.mesh.coords(rank).pp) if path in layer.paths]
            parts = [single.logs[name].params[path] for name in own if path in single.logs[name].params]
            if not parts or not close(grads[path], cut(plan, spec, torch.stack(parts).sum(0), rank)):
                return None
    if len(spec.owners) < 2:
        return None
    stages = ", ".join(map(str, spec.owners))
    text = f"Each of the stages {stages} has the gradient of its own layers alone: the sum is missing."
    return Said("sum missing", text, advice.LEAF, "pp")


def _grid(case: Case, ranks: Ranks, path: str) -> Grid:
    """The shards of the first replica on the first stage that holds the leaf; whole leaves are padded away."""
    mesh, spec = case.plan.mesh, case.plan.specs[path]
    own = [rank for rank in range(mesh.size) if mesh.coords(rank).pp == spec.owners[0]]
    replica = [rank for rank in own if case.plan.replica(rank) == 0]
    return [[ranks.grads[rank][path] for rank in replica]]


def said_of_leaf(case: Case, path: str, value: Tensor, truth: Tensor) -> Said:
    """Which kind of wrong a whole gradient is."""
    return classify(case, truth, [[value.to(torch.float64)]], False, f"The gradient of {path} is")
