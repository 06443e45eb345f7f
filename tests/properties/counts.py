"""What a step of the chain communicates, by closed formulas: calls and bytes of each kind on each rank."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch

import functional_par as fp
from functional_par.buckets import buckets
from functional_par.comm.traffic import Flow, measured
from functional_par.traffic import step_traffic

from .layouts import EMBED
from .single import Batch

FORWARD, BACKWARD = "forward", "backward"

# Of one layer for one microbatch, over tp: (phase, kind) to the size of what each call carries. Entering split compute is
# free forward and a sum of the input gradient backward in ALL_REDUCE; leaving it is the reverse.
LAYERS = {
    "ALL_REDUCE": {
        "embed": [(FORWARD, "all_reduce", "whole")],
        "block": [(FORWARD, "all_reduce", "whole"), (BACKWARD, "all_reduce", "whole")],
        "head": [(BACKWARD, "all_reduce", "whole")],
        "loss": [(FORWARD, "all_reduce", "number")],
    },
    "REDUCE_SCATTER": {
        "embed": [(FORWARD, "reduce_scatter", "whole"), (BACKWARD, "all_gather", "window")],
        "block": [
            (FORWARD, "all_gather", "window"),
            (FORWARD, "reduce_scatter", "whole"),
            (BACKWARD, "all_gather", "window"),
            (BACKWARD, "reduce_scatter", "whole"),
        ],
        "head": [(FORWARD, "all_gather", "window"), (BACKWARD, "reduce_scatter", "whole")],
        "loss": [(FORWARD, "all_reduce", "number")],
    },
}


def step(plan: fp.Plan, rank: int, batch: Batch, norm: float) -> tuple[Counter[Any], Counter[Any]]:
    """Calls and bytes of one step on one rank, by (phase, label, kind). The bytes of the metrics are left out."""
    mesh, coords, m = plan.mesh, plan.mesh.coords(rank), plan.microbatches
    rows, seq = batch["labels"].shape
    whole = 8 * rows // plan.replicas // m * seq * EMBED
    window = whole // mesh.tp if plan.mode.value == "REDUCE_SCATTER" else whole
    sizes = {"whole": whole, "window": window, "number": 8}
    calls: Counter[Any] = Counter()
    nbytes: Counter[Any] = Counter()

    def add(phase: str, label: str, kind: str, n: int, size: int) -> None:
        calls[phase, label, kind] += n
        nbytes[phase, label, kind] += n * size

    for layer in plan.layers_on(coords.pp) if mesh.tp > 1 else ():
        for phase, kind, size in LAYERS[plan.mode.value][layer.name.rstrip("0123456789")]:
            add(phase, "tp", kind, m, sizes[size])
    if coords.pp > 0:
        add(FORWARD, "pp", "recv", m, window)
        add(BACKWARD, "pp", "send", m, window)
    if coords.pp < mesh.pp - 1:
        add(FORWARD, "pp", "send", m, window)
        add(BACKWARD, "pp", "recv", m, window)
    if plan.replicas > 1:
        add("count", "ep+dp", "all_reduce", 1, 8)
    for bucket in buckets(plan, rank):
        if len(bucket.ranks) > 1:
            add("gradients", bucket.label, "all_reduce", 1, 8 * bucket.elements)
    if mesh.size > 1:
        calls["metrics", "ep+pp+dp+cp+tp", "all_reduce"] += 2 if math.isinf(norm) else 1
    return calls, nbytes


def check(plan: fp.Plan, rank: int, record: Any, steps: int, batch: Batch, norm: float) -> None:
    """What a rank recorded in so many steps is that many times the formula: the one above and the library's."""
    calls, nbytes = step(plan, rank, batch, norm)
    found = Counter({key: n for key, n in record.calls.items() if key[0] != "agreement"})
    assert found == Counter({key: steps * n for key, n in calls.items()}), rank
    # That all ranks have the same plan, and the ranks of a pipeline the same shapes, is checked once.
    agreed = {key[1]: n for key, n in record.calls.items() if key[0] == "agreement"}
    assert agreed == ({"ep+pp+dp+cp+tp": 1} if plan.mesh.size > 1 else {}) | ({"pp": 1} if plan.mesh.pp > 1 else {})
    sizes = {key: n for key, n in record.nbytes.items() if key[0] not in ("metrics", "agreement")}
    assert sizes == {key: steps * n for key, n in nbytes.items()}, rank
    fields = {name: ((len(x) // plan.pieces, *x.shape[1:]), x.dtype) for name, x in batch.items()}
    foreseen = step_traffic(plan, rank, fields, torch.float64, norm).flows
    assert measured(record).flows == {key: Flow(*(steps * n for n in flow)) for key, flow in foreseen.items()}, rank
