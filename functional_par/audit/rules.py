"""What a wrong operation says about the mistake: rules on how its inputs and its result lie on the ranks, sure ones first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from functional_par.audit import advice
from functional_par.audit.finding import Kind
from functional_par.audit.layout import Grid
from functional_par.audit.numbers import (
    another_order,
    axes_of_factor,
    extra_term,
    factor_of,
    first_chunk,
    joins,
    lost_part,
    named_factor,
)
from functional_par.audit.observe import Case
from functional_par.audit.story import Moment, label, operation


@dataclass(frozen=True)
class Said:
    """What a rule says of an operation."""

    kind: Kind
    text: str
    advice: str
    axis: str = ""
    ratio: float | None = None


@dataclass(frozen=True)
class Scene:
    """An operation that is wrong, and what it was given.

    Attributes:
        at: the operation.
        inputs: what it was given.
        terms: all floating-point values of the layer before it, by name.
    """

    case: Case
    at: Moment
    inputs: tuple[Moment, ...]
    terms: dict[str, Tensor]

    @property
    def name(self) -> str:
        return self.at.node.name.removeprefix("kernel ")

    @property
    def called(self) -> str:
        return operation(self.at.node)

    def label(self, given: Moment) -> str:
        """What to call an input in a sentence about the operation."""
        return label(given.node, self.at.node.place)

    def cut(self, axis: str) -> list[tuple[Moment, int]]:
        """The inputs that are cut along an axis, and in which dim."""
        found = []
        for given in self.inputs:
            lie = getattr(given.layout, axis, None)
            if isinstance(lie, int):
                found.append((given, lie))
        return found

    def partial(self, axis: str) -> list[Moment]:
        """The inputs that are terms of a sum along an axis."""
        return [given for given in self.inputs if getattr(given.layout, axis, None) == "sum"]


def _extra_term(scene: Scene) -> Said | None:
    """A bias, or a residual, that is whole on every rank, beside a partial sum."""
    at, n = scene.at, scene.case.plan.mesh.tp
    alike = any(True for _ in joins(at.whole, at.grid, tp="same"))
    if not alike and (name := extra_term(at.whole, at.grid, "tp", scene.terms)):
        text = f"{name}, whole on every rank, is added to a partial sum: the sum over tp has it tp={n} times."
        return Said("added before the sum", text, advice.added(name), "tp")
    if name := lost_part(at.whole, at.grid, "tp", scene.terms):
        text = f"Only 1/{n} of {name} is in the result, which is not summed over tp any more."
        return Said("1/n", text, advice.lost(name), "tp", 1 / n)
    if name := extra_term(at.whole, at.grid, "rows", scene.terms):
        text = (
            f"{name}, the same for every row, is added once for each of {pieces(scene.case)}, which the step adds up."
        )
        return Said("added for every piece of the batch", text, advice.PER_PIECE, "rows")
    return None


def _mixed(scene: Scene) -> Said | None:
    """A sum of a partial sum and of a multiple of something else."""
    if scene.name not in ("add", "sub", "lerp", "addcmul"):
        return None
    partial, others = scene.partial("tp"), [m for m in scene.inputs if getattr(m.layout, "tp", None) != "sum"]
    if not partial or not others:
        return None
    other = scene.label(others[0])
    text = f"{other} is added to {scene.label(partial[0])}, which is a partial sum over tp."
    return Said("added before the sum", text, advice.added(other), "tp")


def _padding(scene: Scene) -> Said | None:
    for given, dim in scene.cut("tp"):
        if given.layout and given.layout.padding and scene.name in REDUCING | {"sum", "matmul", "linear", "einsum"}:
            n = given.layout.padding
            text = f"{scene.called} over dim {dim}, which tp does not divide, counts {n} entries of padding on the last rank."
            return Said("padding", text, advice.PADDING, "tp")
    return None


def _wrong_dim(scene: Scene) -> Said | None:
    if scene.name not in ("par.all_gather", "par.all_to_all", "par.reduce_scatter"):
        return None
    dims = scene.at.node.dims or ()
    for given, dim in scene.cut("tp"):
        if dim not in [d % given.whole.ndim for d in dims]:
            text = f"{scene.called} along dim {dims[0]} of a value that tp cuts in dim {dim}."
            return Said("wrong dim", text, f"{scene.name}(..., {dim}) along the dim that is cut.", "tp")
    return None


def _chunk(scene: Scene) -> Said | None:
    axis = first_chunk(scene.at.whole, scene.at.grid)
    if axis == "tp":
        text = f"{scene.called} gives every rank of tp the chunk of the first, as if each began at position 0."
        return Said("first chunk on every rank", text, advice.FIRST_CHUNK, "tp")
    if axis == "rows":
        text = f"{scene.called} numbers the rows of each of {pieces(scene.case)} from 0."
        return Said("first chunk on every rank", text, advice.FIRST_ROWS, "rows")
    return None


def _look_up(scene: Scene) -> Said | None:
    tables = [(m, d) for m, d in scene.cut("tp") if m.whole.is_floating_point()]
    ids = [m for m in scene.inputs if not m.whole.is_floating_point()]
    if scene.name not in LOOKING_UP or not tables or (not ids and len(scene.at.node.inputs) < 2):
        return None
    text = f"{scene.called} in {scene.label(tables[0][0])}, of which each rank of tp has a part (dim {tables[0][1]})."
    return Said("look-up in a cut table", text, advice.LOOK_UP, "tp")


def _reduced(scene: Scene) -> Said | None:
    if scene.name not in REDUCING and scene.called not in REDUCING:
        return None
    for axis in ("tp", "rows"):
        for given, dim in scene.cut(axis):
            dims = scene.at.node.dims
            if scene.called.startswith("fp.nn."):
                dims = (-1,)
            if dims is None or dim in [d % given.whole.ndim for d in dims if -given.whole.ndim <= d < given.whole.ndim]:
                return _said_reduced(scene, axis, dim)
    return None


def _said_reduced(scene: Scene, axis: str, dim: int) -> Said:
    if axis == "rows":
        text = f"{scene.called} over dim {dim}, the rows: each of {pieces(scene.case)} reduces its own."
        return Said("depends on the other rows", text, advice.ROWS, "rows")
    text = f"{scene.called} over dim {dim}, which is cut over tp: each rank sees its own part."
    return Said("reduced over a cut dim", text, advice.reduced(scene.name, dim), "tp")


def _not_linear(scene: Scene) -> Said | None:
    if scene.name.startswith("par."):
        return None
    if scene.name in ("mul", "div", "truediv") and factor_of(scene.at.whole, scene.at.grid) is not None:
        return None  # by a number
    for axis in ("tp", "rows"):
        if partial := scene.partial(axis):
            what = scene.label(partial[0])
            over = "tp" if axis == "tp" else pieces(scene.case)
            text = f"{scene.called} is not linear, and {what} is a partial sum over {over}."
            kind: Kind = "partial sum in a non-linear function" if axis == "tp" else "depends on the other rows"
            return Said(kind, text, advice.not_linear(scene.called) if axis == "tp" else advice.ROWS, axis)
    return None


def _taken_apart(scene: Scene) -> Said | None:
    if scene.name not in APART:
        return None
    for given, dim in scene.cut("tp"):
        text = f"{scene.called} takes {scene.label(given)} apart as if it were whole; tp cuts its dim {dim}."
        return Said("cut dim taken apart", text, advice.APART, "tp")
    return None


def _numbers(scene: Scene) -> Said | None:
    return of_numbers(scene.case, scene.at.whole, scene.at.grid, scene.called)


def of_numbers(case: Case, whole: Tensor, grid: Grid, called: str = "It") -> Said | None:
    factor = factor_of(whole, grid)
    if factor is not None and abs(factor - 1) > 1e-6:
        return factor_said(case, factor, f"{called} gives")
    if another_order(whole, grid):
        return Said("another order", f"{called} gives the right numbers in another order.", advice.ORDER, "tp")
    return None


def factor_said(case: Case, factor: float, who: str) -> Said:
    """A value that is wrong by a factor."""
    if abs(factor) < 1e-9:
        return Said("zero", f"{who} zero, though it should not be.", advice.ZERO, "", 0.0)
    if abs(factor + 1) < 1e-6:
        return Said("sign", f"{who} the right numbers with the wrong sign.", advice.SIGN, "", factor)
    axes = axes_of_factor(factor, case.plan)
    if len(axes) > 1:
        axes = tuple(axis for axis in axes if case.guilty(axis)) or axes
    axis = "" if not axes or (len(axes) > 1 and "tp" in axes) else "tp" if axes == ("tp",) else "rows"
    text = f"{who} {named_factor(factor, case.plan, axes)} what it should be."
    return Said("n times" if abs(factor) > 1 else "1/n", text, advice.times(factor), axis, factor)


def pieces(case: Case) -> str:
    """The pieces of the batch, for a sentence."""
    plan = case.plan
    return f"the {case.pieces} pieces of the batch ({plan.replicas} replicas * {plan.microbatches} microbatches)"


RULES: tuple[Callable[[Scene], Said | None], ...] = (
    _extra_term,
    _padding,
    _chunk,
    _wrong_dim,
    _look_up,
    _reduced,
    _mixed,
    _not_linear,
    _taken_apart,
    _numbers,
)

REDUCING = frozenset(
    {
        *("mean", "var", "std", "var_mean", "std_mean", "norm", "vector_norm", "normalize", "median"),
        *("layer_norm", "rms_norm", "batch_norm", "group_norm", "fp.nn.rms_norm", "fp.nn.layer_norm"),
        *("softmax", "log_softmax", "logsumexp", "cross_entropy", "nll_loss", "mse_loss", "fp.nn.cross_entropy"),
        *("max", "min", "amax", "amin", "argmax", "argmin", "topk", "sort", "argsort", "cumsum", "cumprod", "prod"),
        "scaled_dot_product_attention",
    }
)
"""Operations whose result along a dim is not the sum of those of its parts."""

LOOKING_UP = frozenset({"getitem", "embedding", "index_select", "gather", "take_along_dim"})

APART = frozenset(
    {
        *("view", "reshape", "flatten", "unflatten", "permute", "getitem", "narrow", "select"),
        *("chunk", "split", "tensor_split", "unbind"),
    }
)
"""Operations that give other shapes, or parts, to the same numbers."""
