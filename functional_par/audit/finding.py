"""What an audit says: findings, each with a kind, a layer, a line and what to write, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from functional_par.mesh import Mesh

Kind = Literal[
    "added before the sum",  # a bias or residual, whole on every rank, beside a partial sum
    "partial sum in a non-linear function",
    "reduced over a cut dim",  # a mean, norm, softmax, ... of this rank's part
    "look-up in a cut table",  # ids without offset or mask
    "cut dim taken apart",  # views, chunks, heads with global sizes
    "wrong dim",  # of a gather
    "first chunk on every rank",  # positions, windows, dropout that start anew on every rank or piece
    "padding",  # counted
    "depends on the other rows",  # of its microbatch or replica
    "added for every piece of the batch",  # a penalty on weights, say
    "kernel",  # the fast form is not its definition
    "not the derivative",  # a backward by hand, wrong in one process already
    "n times",
    "1/n",
    "sign",
    "zero",
    "sum missing",  # of a cotangent or gradient
    "another order",  # the right numbers
    "missing tie",  # against the reference
    "counts other terms",  # a loss against the reference
    "differs",  # none of the others
]


SHOWN = 6
"""Consequences that a report lists."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: what kind of wrong.
        what: whose numbers they are: ``"value"``, ``"cotangent"``, ``"loss"``, or the path of a leaf, whose gradient is meant.
        text: what happens, in a sentence.
        advice: what to write instead.
        layer: name of the layer, ``"loss"`` for the loss; empty where no layer is to blame.
        stage: its pipeline stage.
        place: file, line and code.
        axis: along which it goes wrong: ``"tp"``, or ``"rows"`` for the pieces of the batch (replicas and microbatches).
        ratio: by which factor the numbers are too large, where one factor explains them.
        largest: largest absolute difference of an entry.
        also: other layers of the same function.
    """

    kind: Kind
    what: str
    text: str
    advice: str
    layer: str = ""
    stage: int | None = None
    place: str = ""
    axis: str = ""
    ratio: float | None = None
    largest: float = 0.0
    also: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"layer {self.layer!r}" if self.layer else ""
        if self.stage is not None:
            where += f" (stage {self.stage}{', as ' + ', '.join(map(repr, self.also)) if self.also else ''})"
        at = ", ".join(part for part in (where, self.place) if part)
        head = f"{self.kind}: {at}" if at else self.kind
        return f"{head}\n   {self.text} Off by {self.largest:.3g}.\n   Write: {self.advice}"


@dataclass(frozen=True)
class Difference:
    """A loss or a gradient that is not what it should be, because of a finding.

    Attributes:
        what: ``"loss"``, or the path of a leaf.
        largest: largest absolute difference of an entry.
        ratio: as in ``Finding``.
    """

    what: str
    largest: float
    ratio: float | None

    def __str__(self) -> str:
        by = f"off by {self.largest:.2g}" if self.ratio is None else f"{self.ratio:.4g} times"
        return f"{self.what} {by}"


@dataclass(frozen=True)
class Audit:
    """The result of ``fp.audit``.

    Attributes:
        mesh: on which the program ran.
        findings: what is wrong; empty if loss and every gradient are right.
        consequences: the loss and the gradients that differ because of the findings.
        compared: what was compared, in words.
        notes: what was made up or left out.
        seconds: how long it took.
    """

    mesh: Mesh
    findings: tuple[Finding, ...]
    consequences: tuple[Difference, ...]
    compared: str
    notes: tuple[str, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def check(self) -> None:
        """Raise AssertionError, with the report, unless nothing is wrong."""
        if not self.ok:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        n = len(self.findings)
        verdict = "ok" if self.ok else f"{n} finding{'s' if n > 1 else ''}"
        lines = [f"audit on {self.mesh}: {verdict}", f"compared: {self.compared}; {self.seconds:.1f} s"]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"{i}. {finding}" for i, finding in enumerate(self.findings, 1)]
        if self.consequences:
            more = len(self.consequences) - SHOWN
            shown = [*map(str, self.consequences[:SHOWN]), *([f"and {more} more"] if more > 0 else [])]
            lines.append("in consequence: " + "; ".join(shown))
        return "\n".join(lines)
