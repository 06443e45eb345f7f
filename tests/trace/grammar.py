"""Random small models, one faulty or none: a stream of activations that is whole or split on the sequence over tp, and
operations that enter and leave it. Each operation may be given a fault: a collective left out, doubled or confused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import functional_par as fp
from tests.trace.harness import EMBED, FIELDS, SEQ, column, enter, param, row, total

LEAVES = {"up": column, "down": row, "g": lambda: param(EMBED), "s": lambda: param(EMBED, dims="ffn")}


@dataclass(frozen=True)
class Operation:
    """One layer.

    Attributes:
        kind: what it computes.
        split: whether the stream that enters it is split on the sequence.
        fault: what is wrong with it; "" for nothing.
        borrow: read the scale of an earlier layer instead of one's own; "" for one's own.
    """

    kind: str
    split: bool
    fault: str = ""
    borrow: str = ""


FAULTS = {
    "mlp": ["no entry", "double entry", "no exit", "double exit"],
    "mlp switching": ["no entry", "no exit"],
    "residual mlp": ["no entry", "no exit", "double entry"],
    "scale": ["sum of the same"],
    "partial scale": ["no entry", "whole too"],
    "gate": ["no entry", "gate without pvary"],
    "switch": ["confused"],
    "mean gate": ["mean without pvary"],
    "summed parameter": ["no sum", "without pvary"],
    "normed weight": ["norm without pvary", "no entry"],
    "gathered weight": ["gathered to the other type"],
    "taken scale": ["whole too", "taken from an activation"],
    "masked": ["without pvary"],
    "buffer": ["whole in split"],
}


def variation(x: Tensor, par: Any, times: int) -> Tensor:
    for _ in range(times):
        x = par.pvary(x, "tp")
    return x


def entered(x: Tensor, par: Any, op: Operation) -> Tensor:
    """The whole sequence, varying."""
    if op.split:
        x = par.all_gather(x, "tp", 1, to="replicated" if op.fault == "no entry" else "varying")
        return par.pvary(x, "tp") if op.fault == "double entry" else x
    return variation(x, par, {"no entry": 0, "double entry": 2}.get(op.fault, 1))


def left(y: Tensor, par: Any, op: Operation, split: bool) -> Tensor:
    """The sum of partial results, as a stream."""
    if op.fault == "no exit":
        return par.take(y, "tp", 1, _starts(par), SEQ // par.size("tp")) if split else y
    y = par.reduce_scatter(y, "tp", 1) if split else par.psum(y, "tp")
    return par.psum(y, "tp") if op.fault == "double exit" else y


def _starts(par: Any) -> tuple[int, ...]:
    return tuple(range(0, SEQ, SEQ // par.size("tp")))


def hidden(p: Any, x: Tensor, par: Any, op: Operation) -> Tensor:
    return torch.tanh(entered(x, par, op) @ p["up"].T)


def mlp(p: Any, x: Tensor, par: Any, op: Operation) -> Tensor:
    return left(hidden(p, x, par, op) @ p["down"].T, par, op, op.split)


def mlp_switching(p: Any, x: Tensor, par: Any, op: Operation) -> Tensor:
    return left(hidden(p, x, par, op) @ p["down"].T, par, op, not op.split)


def residual_mlp(p: Any, x: Tensor, par: Any, op: Operation) -> Tensor:
    return x + mlp(p, x * p["g"], par, op)


def scale(p: Any, x: Tensor, par: Any, op: Operation) -> Tensor:
    y = x * p["g"]
    return par.psum(y, "tp") if op.fault == "sum of the same" else y


def partial_scale(p: Any, x: Tensor, par: Any, op: Operation) -> Tensor:
    y = left(hidden(p, x, par, op) @ p["down"].T * p["g"], par, op, op.split)
    # A leaf that scales the split stream owes what one that scales partial sums does.
    return y * p["g"] if op.fault == "whole too" else y


def gate(p: Any, x: Tensor, par: Any, op: Operation) -> Tensor:
    share = torch.sigmoid(x.sum(-1, keepdim=True))
    if op.split:
        share = par.all_gather(share, "tp", 1, to="replicated" if op.fault == "gate without pvary" else "varying")
    elif op.fault != "gate without pvary":
        share = par.pvary(share, "tp")
    return left(share * (hidden(p, x, par, op) @ p["down"].T), par, op, op.split)


def switch(p: Any, x: Tensor, par: Any, op: Operation) -> Tensor:
    if op.split:
        return par.all_gather(x, "tp", 1, to="varying" if op.fault else "replicated")
    return par.take(x, "tp", 1, _starts(par), SEQ // par.size("tp")) if op.fault else par.slice(x, "tp", 1)


def mean_gate(p: Any, x: Tensor, par: Any, op: Operation) -> Tensor:
    total_ = x.sum(1, keepdim=True)
    if not op.split:
        return x * torch.sigmoid(total_)
    total_ = par.psum(total_, "tp")
    return x * torch.sigmoid(total_ if op.fault else par.pvary(total_, "tp"))


def summed_parameter(p: Any, x: Tensor, par: Any, op: Operation) -> Tensor:
    s = p["s"].square().sum()
    s = s if op.fault == "no sum" else par.psum(s, "tp")
    w = p["g"] * s
    if op.split and op.fault == "":
        w = par.pvary(w, "tp")
    return x * w


def normed_weight(p: Any, x: Tensor, par: Any, op: Operation) -> Tensor:
    norm = par.psum(p["up"].square().sum(), "tp").sqrt()
    w = p["up"] / (norm if op.fault == "norm without pvary" else par.pvary(norm, "tp"))
    return left(torch.tanh(entered(x, par, op) @ w.T) @ p["down"].T, par, op, op.split)


def gathered_weight(p: Any, x: Tensor, par: Any, op: Operation) -> Tensor:
    right = "varying" if op.split else "replicated"
    wrong = "replicated" if op.split else "varying"
    return x @ par.all_gather(p["up"], "tp", 0, to=wrong if op.fault else right).T


def taken_scale(p: Any, x: Tensor, par: Any, op: Operation) -> Tensor:
    n = SEQ // par.size("tp")
    source = x.mean((0, 1)) if op.fault == "taken from an activation" else p["g"]
    part = par.take(source, "tp", 0, _starts(par), n) * p["s"]
    y = x * (par.pvary(par.psum(part.sum(), "tp"), "tp") if op.split else par.psum(part.sum(), "tp"))
    return y + p["g"] if op.fault == "whole too" else y


def masked(p: Any, x: Tensor, par: Any, op: Operation) -> Tensor:
    if op.split:
        return x * (par.axis_index("tp") * 0 + 1)
    y = x if op.fault else par.pvary(x, "tp")
    return par.psum(torch.where(par.axis_index("tp") == 0, y, 0.0), "tp")


def buffer(p: Any, x: Tensor, par: Any, op: Operation) -> Tensor:
    h = hidden(p, x, par, op) @ p["down"].T
    out = torch.zeros_like(h)
    out[:, :4] = h[:, :4]
    out[:, 4:] = par.all_gather(x, "tp", 1, to="replicated")[:, 4:] if op.fault and op.split else h[:, 4:]
    if op.fault and not op.split:
        out[:, 4:] = x[:, 4:] / par.size("tp")
    return left(out, par, op, op.split)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "mlp": mlp,
    "mlp switching": mlp_switching,
    "residual mlp": residual_mlp,
    "scale": scale,
    "partial scale": partial_scale,
    "gate": gate,
    "switch": switch,
    "mean gate": mean_gate,
    "summed parameter": summed_parameter,
    "normed weight": normed_weight,
    "gathered weight": gathered_weight,
    "taken scale": taken_scale,
    "masked": masked,
    "buffer": buffer,
}

SWITCHES = {"switch", "mlp switching"}


def layer_of(op: Operation) -> Callable[..., Any]:
    """The operation beside a way around it, so that whatever enters it gets a whole cotangent too, and a partial one shows."""

    def layer(p: Any, x: Tensor, par: Any) -> Tensor:
        around = switch(p, x, par, replace(op, fault="")) if op.kind in SWITCHES else x
        return FUNCTIONS[op.kind](p, x, par, op) + around

    return layer


def model_of(operations: Sequence[Operation]) -> fp.Model:
    """A model of these operations; the stream is whole before the first, and is made whole before the loss."""
    leaves: dict[str, Any] = {"enter": {"w": param(EMBED, EMBED)}}
    layers: list[Any] = [("enter", "enter", enter)]
    split = False
    for i, op in enumerate(operations):
        leaves[f"op{i}"] = {name: make() for name, make in LEAVES.items()}
        paths = {name: f"op{i}.{name}" for name in LEAVES}
        if op.borrow:
            layers.append((f"own{i}", f"op{i}.g", lambda p, x, par: x))
            paths["g"] = op.borrow
        layers.append((f"op{i}", paths, layer_of(op)))
        split = op.split != (op.kind in SWITCHES)
    if split:
        layers.append(("whole", "enter", lambda p, x, par: par.all_gather(x, "tp", 1, to="replicated")))
    return fp.Model(leaves, layers, total, FIELDS)


@st.composite
def operations(draw: st.DrawFn, faulty: bool) -> list[Operation]:
    """One to four operations, of which one has a fault if ``faulty``; a later one may share a scale with an earlier."""
    split = draw(st.booleans())
    found = [Operation("switch", False)] if split else []
    n = draw(st.integers(1, 3))
    at = draw(st.integers(0, n - 1)) if faulty else None
    for i in range(n):
        kind = draw(st.sampled_from(sorted(FUNCTIONS)))
        fault = draw(st.sampled_from(FAULTS[kind])) if i == at else ""
        found.append(Operation(kind, split, fault))
        split = split != (kind in SWITCHES)
    return found
