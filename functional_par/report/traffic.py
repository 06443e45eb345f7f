"""What a step sends, in one line."""

from __future__ import annotations

from functional_par.plan import Plan
from functional_par.report.stages import counted
from functional_par.report.text import size
from functional_par.traffic import step_traffic

_NUMBERS = ("count", "metrics")
"""Phases in which numbers of a step go round: how many terms its loss has, the loss, the norm."""


def sent(plan: Plan) -> str:
    """Bytes that the rank which sends most puts on the wire in a step, in all and along each set of axes; "" on one rank."""
    if plan.mesh.size == 1:
        return ""
    batch, dtype, _ = counted(plan)
    ranks = (plan.mesh.rank(pp=pp) for pp in range(plan.mesh.pp))
    most = max((step_traffic(plan, rank, batch, dtype) for rank in ranks), key=lambda found: found.sent)
    parts: dict[str, int] = {}
    for (phase, label, _), flow in most.flows.items():
        what = "loss and norm" if phase in _NUMBERS else label
        parts[what] = parts.get(what, 0) + flow.sent
    along = ", ".join(f"{what} {size(n)}" for what, n in sorted(parts.items(), key=lambda each: -each[1]))
    own = " What maps of your own exchange comes on top." if plan.maps else ""
    return f"sent in a step of such microbatches: at most {size(most.sent)} a rank ({along}).{own}"
