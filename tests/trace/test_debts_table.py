"""What every kind of use of a leaf owes, in both modes: the axes, the layer and the line, and that the gradient is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_par as fp
from functional_par.errors import MissingCollective
from functional_par.nn.stream import sequence_window, to_stream, whole_sequence
from tests.trace.harness import FIELDS, SEQ, column, judge, param, program_of, row, total

AR, RS = "ALL_REDUCE", "REDUCE_SCATTER"


@dataclass(frozen=True)
class Row:
    """One layer of the table.

    Attributes:
        params: its leaves.
        fn: the layer, which leaves out what surrounds every layer: ``x + fn(x)``.
        owes: leaf to the mode in which it owes a sum over tp (AR, RS, or "both") and a piece of the line that says why.
    """

    params: dict[str, fp.Param]
    fn: Callable[..., Tensor]
    owes: dict[str, tuple[str, str]]


TABLE: dict[str, Row] = {}


def row_of(owes: dict[str, tuple[str, str]], **params: fp.Param) -> Callable[..., Any]:
    def note(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        TABLE[fn.__name__] = Row(params, fn, owes)
        return fn

    return note


MLP = {"up": column(), "down": row()}


def hidden(p: Any, x: Tensor, par: Any) -> Tensor:
    return torch.tanh(whole_sequence(x, par, 1) @ p["up"].T)


@row_of({"g": (RS, "fp.nn.rms_norm(")}, g=param(6))
def rms_norm(p, x, par):
    return fp.nn.rms_norm(x, p["g"], par)


@row_of({"g": (RS, "fp.nn.layer_norm("), "b": (RS, "fp.nn.layer_norm(")}, g=param(6), b=param(6))
def layer_norm(p, x, par):
    return fp.nn.layer_norm(x, p["g"], p["b"], par)


HEADS = {"q": param(2, 2, 6, dims="heads head embed"), "out": param(6, 2, 2, dims="embed heads head")}


@row_of(
    {"qn": ("both", 'fp.nn.rms_norm(q, p["qn"]'), "kn": ("both", 'fp.nn.rms_norm(k, p["kn"]')},
    k=param(2, 2, 6, dims="kv_heads head embed"),
    qn=param(2),
    kn=param(2),
    **HEADS,
)
def norms_of_split_heads(p, x, par):
    q, k = fp.nn.column_linear(x, (p["q"], p["k"]), par)
    q = fp.nn.rms_norm(q, p["qn"], par)
    k = fp.nn.rms_norm(k, p["kn"], par)
    return fp.nn.row_linear(fp.nn.attention(q, k, k, par, n_heads=2, n_kv_heads=2), p["out"], par, n_in=2)


@row_of(
    {
        "k": ("both", "fp.nn.column_linear(x, ("),
        "bk": ("both", "fp.nn.column_linear(x, ("),
        "kn": ("both", "rms_norm(k"),
    },
    k=param(1, 2, 6, dims="kv_heads head embed"),
    bk=param(1, 2, dims="kv_heads head"),
    kn=param(2),
    **HEADS,
)
def multi_query_keys_kept_whole(p, x, par):
    q, k = fp.nn.column_linear(x, (p["q"], p["k"]), par, (None, p["bk"]))
    k = fp.nn.rms_norm(k, p["kn"], par)
    return fp.nn.row_linear(fp.nn.attention(q, k, k, par, n_heads=2, n_kv_heads=1), p["out"], par, n_in=2)


@row_of(
    {"k": ("both", "fp.nn.column_linear(x, (")},
    q=param(6, 1, 6, dims="heads head embed"),
    k=param(3, 1, 6, dims="kv_heads head embed"),
    out=param(6, 6, 1, dims="embed heads head"),
)
def grouped_keys_that_tp_does_not_divide(p, x, par):
    q, k = fp.nn.column_linear(x, (p["q"], p["k"]), par)
    return fp.nn.row_linear(fp.nn.attention(q, k, k, par, n_heads=6, n_kv_heads=3), p["out"], par, n_in=2)


@row_of({"r": (RS, 'x @ p["r"]')}, r=param(6), **MLP)
def router_on_the_stream(p, x, par):
    share = torch.sigmoid(x @ p["r"]).unsqueeze(-1)
    share = whole_sequence(share, par, 1)
    return to_stream(share * (hidden(p, x, par) @ p["down"].T), par, 1)


@row_of({"r": ("both", 'torch.sigmoid(entered @ p["r"])')}, r=param(6), **MLP)
def router_on_what_has_entered(p, x, par):
    entered = whole_sequence(x, par, 1)
    share = torch.sigmoid(entered @ p["r"]).unsqueeze(-1)
    return to_stream(share * (torch.tanh(entered @ p["up"].T) @ p["down"].T), par, 1)


@row_of({"b": (RS, "fp.nn.row_linear(")}, b=param(6), c=param(6, dims="ffn"), **MLP)
def biases_of_a_column_and_a_row(p, x, par):
    h = fp.nn.column_linear(x, p["up"], par, p["c"])
    return fp.nn.row_linear(h, p["down"], par, p["b"])


@row_of({"g": ("both", 'p["down"].T * p["g"]')}, g=param(6), **MLP)
def gate_on_partial_sums(p, x, par):
    return to_stream(hidden(p, x, par) @ p["down"].T * p["g"], par, 1)


@row_of({"g": (RS, 'x * torch.tanh(p["g"])')}, g=param(6))
def gate_on_the_stream(p, x, par):
    return x * torch.tanh(p["g"])


@row_of({"g": ("both", "h * torch.sigmoid")}, g=param(1), **MLP)
def one_number_for_all_hidden_units(p, x, par):
    h = hidden(p, x, par)
    return to_stream(h * torch.sigmoid(p["g"]) @ p["down"].T, par, 1)


@row_of({}, w=param(5, 6, dims="vocab embed"))
def embedding_with_a_cut_vocabulary(p, x, par):
    return fp.nn.embedding(par.batch["ids"], p["w"], par, vocab=5)


@row_of({"w": (RS, "x + sequence_window(")}, w=param(SEQ, 6, dims="seq embed"))
def positions(p, x, par):
    return x + sequence_window(p["w"], par, 0)


@row_of({"g": (RS, "to_stream(hidden(")}, g=param(6), **MLP)
def leaf_read_whole_and_split(p, x, par):
    # In REDUCE_SCATTER both uses are partial and agree; in ALL_REDUCE only that of the partial sums is.
    g = p["g"] if par.sequence_split else par.pvary(p["g"], "tp")
    y = to_stream(hidden(p, x, par) @ p["down"].T * g, par, 1)
    return y + torch.sin(x) * p["g"]


@row_of({"w": (AR, 'cut * p["w"]'), "h": (RS, 'x * p["h"]')}, w=param(6), h=param(6))
def branch_that_lies_the_other_way(p, x, par):
    if par.sequence_split:
        whole = par.all_gather(torch.sin(x), "tp", 1, to="replicated")
        return x * p["h"] + par.slice(whole * p["w"], "tp", 1)
    cut = par.slice(torch.sin(x), "tp", 1)
    return x * p["h"] + par.all_gather(cut * p["w"], "tp", 1, to="replicated")


@row_of({"w": ("both", "windows of")}, w=param(6, 6), down=row())
def windows_of_a_whole_weight(p, x, par):
    n = 6 // par.size("tp")
    own = par.take(p["w"], "tp", 0, tuple(range(0, 6, n)), n)
    return to_stream(whole_sequence(x, par, 1) @ own.T @ p["down"].T, par, 1)  # windows of


@row_of({}, w=param(6, 6), down=row())
def slices_of_a_whole_weight(p, x, par):
    own = par.slice(p["w"], "tp", 0)
    h = whole_sequence(x, par, 1) @ own.T
    return to_stream(h @ p["down"].T, par, 1)


@row_of({"s": (RS, 'x * p["s"]')}, s=param(6), frozen=param(6, trainable=False))
def frozen_leaf_beside_a_trained_one(p, x, par):
    return x * p["s"] + x * p["frozen"]


def enter(p: Any, x: Any, par: Any) -> Tensor:
    x = torch.tanh(x["x"].to(p["w"].dtype) @ p["w"])
    return par.slice(x, "tp", 1) if par.sequence_split else x


def loss(p: Any, x: Tensor, par: Any) -> tuple[Tensor, Any]:
    """With leaves of its own: one that meets the stream, a split one, and a regulariser that every row pays."""
    whole = par.all_gather(x, "tp", 1, to="replicated") if par.sequence_split else x
    whole = whole * p["scale"]
    whole = whole + par.psum(torch.tanh(par.pvary(whole, "tp") @ p["up"].T) @ p["down"].T * p["mixed"], "tp")
    kept = par.psum(p["up"].square().sum(), "tp") + p["scale"].square().sum()
    return total({}, whole, par)[0] + len(x) * kept, len(x)


LOSS_OWES = {"mixed": ("both", 'p["down"].T * p["mixed"]')}
LOSS = {"scale": param(6), "mixed": param(6), **MLP}


def around(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda p, x, par: torch.tanh(x) + 0.5 * fn(p, x, par)


def model() -> fp.Model:
    leaves = {"enter": {"w": param(6, 6)}, "loss": dict(LOSS), **{name: dict(r.params) for name, r in TABLE.items()}}
    layers = [("enter", "enter", enter), *((name, name, around(r.fn)) for name, r in TABLE.items())]
    return fp.Model(leaves, layers, ("loss", loss), FIELDS)


@cache
def specs(mode: str) -> dict[str, Any]:
    return dict(program_of(model(), mode=mode).plan(fp.Mesh(tp=2)).specs)


@pytest.mark.parametrize("mode", [AR, RS])
@pytest.mark.parametrize("name", [*TABLE, "loss"])
def test_every_leaf_owes_what_the_table_says_with_the_layer_and_the_line(name, mode):
    owes = TABLE[name].owes if name in TABLE else LOSS_OWES
    for path, spec in specs(mode).items():
        layer, leaf = path.split(".")
        if layer != name:
            continue
        due, line = owes.get(leaf, ("", ""))
        tp = due in (mode, "both")
        expected = (["ep", "dp"] if spec.trainable else []) + ["tp"] * tp
        assert [debt.axis for debt in spec.owes] == expected, path
        for debt in spec.owes:
            assert debt.layer == name
            assert "trace/test_debts_table.py:" in debt.place
        if tp:
            assert spec.owes[-1].reason == "meets data that differ along tp"
            assert line in spec.owes[-1].place, (path, spec.owes[-1].place)


@pytest.mark.parametrize("mode", [AR, RS])
def test_the_gradients_of_all_leaves_of_the_table_are_right(mode):
    judge(model(), fp.Mesh(tp=2), rows=1, mode=mode).check()


@pytest.mark.deep
@pytest.mark.parametrize("mode", [AR, RS])
def test_the_gradients_of_all_leaves_of_the_table_are_right_over_stages_and_replicas(mode):
    judge(model(), fp.Mesh(pp=2, dp=2, tp=2), rows=4, mode=mode, microbatches=2).check()


def test_a_leaf_read_whole_and_split_without_the_pvary_is_refused_in_all_reduce_with_the_fix():
    def fn(p, x, par):
        y = to_stream(hidden(p, x, par) @ p["down"].T * p["g"], par, 1)
        return y + x * p["g"]

    leaves = {"enter": {"w": param(6, 6)}, "body": {"g": param(6), **MLP}}
    wrong = fp.Model(leaves, [("enter", "enter", enter), ("body", "body", fn)], total_of_stream, FIELDS)
    with pytest.raises(MissingCollective, match=r"body\.g is read whole in one place.*write par\.pvary\(w, 'tp'\)"):
        program_of(wrong)
    judge(wrong, fp.Mesh(tp=2), rows=1, mode=RS).check()


def total_of_stream(p: Any, x: Tensor, par: Any) -> tuple[Tensor, int]:
    return total(p, par.all_gather(x, "tp", 1, to="replicated") if par.sequence_split else x, par)


@pytest.mark.parametrize(("mode", "partial"), [(AR, True), (RS, True), (AR, False), (RS, False)])
def test_a_tie_over_stages_owes_pp_and_tp_where_its_places_are_partial(mode, partial):
    def body(p, x, par):
        y = hidden(p, x, par) @ p["down"].T
        y = to_stream(y * p["g"] if partial else y, par, 1)
        return torch.tanh(x) + (y if partial else y * p["g"])

    parts = {name: {"g": param(6), **MLP} for name in ("first", "second")}
    layers = [("enter", "enter", enter), ("first", "first", body), ("second", "second", body)]
    tied = fp.Model({"enter": {"w": param(6, 6)}, **parts}, layers, total_of_stream, FIELDS)
    verdict = judge(tied, fp.Mesh(pp=2, tp=2), rows=1, mode=mode, ties=[("first.g", "second.g")])
    verdict.check()
    owed = [debt.axis for debt in verdict.plan.specs["first.g"].owes]
    assert owed == ["ep", "pp", "dp", *(["tp"] if partial or mode == RS else [])]
