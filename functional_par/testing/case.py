"""One example of what a property is about: a model, a layout, batches, and how to train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from functional_par import optim
from functional_par.mesh import Mesh
from functional_par.model import Model
from functional_par.program import Program
from functional_par.testing.batch import Sample
from functional_par.testing.history import History, Training, on_ranks
from functional_par.testing.layout import Layout
from functional_par.transforms import Transform

ADAMW = optim.adamw(lr=1e-2, eps=1e-6, weight_decay=0.1)
"""Smaller eps would make differences out of the rounding of gradients that are zero in truth."""


@dataclass(frozen=True)
class Given:
    """What does not vary between the cases of a suite.

    Attributes:
        others: transforms beside those of the layout.
        batch: ``(rows, seed) -> batch``; None makes batches up.
        fixed: whether all cases have one model.
    """

    others: tuple[Transform, ...] = ()
    batch: Callable[[int, int], Mapping[str, Tensor]] | None = None
    fixed: bool = False


@dataclass(frozen=True)
class Case:
    """One example.

    Attributes:
        model: the model.
        layout: where it lies.
        samples: a batch a step.
        other: another layout.
        clip, norm: of the step.
        order: of the transforms, as a permutation.
        given: what all cases share.
    """

    model: Model
    layout: Layout
    samples: tuple[Sample, ...] = ()
    other: Layout | None = None
    clip: float | None = None
    norm: float = 2.0
    order: tuple[int, ...] = ()
    given: Given = Given()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How hypothesis shows it: a model as the call that made it, and nothing that says nothing."""
        names = [f.name for f in fields(self) if f.name != "given" and getattr(self, f.name) != f.default]
        with printer.group(4, "Case(", ")"):
            for name in names[1:] if self.given.fixed else names:
                printer.break_()
                printer.text(f"{name}=")
                printer.pretty(getattr(self, name))
                printer.text(",")

    def program(self, layout: Layout | None = None) -> Program:
        """The program in the case's layout, or another one."""
        return (layout or self.layout).program(self.model, *self.given.others)

    def batches(self) -> list[Mapping[str, Tensor]]:
        """The samples, made."""
        if self.given.batch is None:
            return [sample.batch(self.model) for sample in self.samples]
        return [self.given.batch(sample.rows, sample.seed) for sample in self.samples]

    def training(self, **changes: Any) -> Training:
        """AdamW, with the case's clipping."""
        return replace(Training(ADAMW, self.clip, self.norm, engine=self.layout.engine), **changes)

    def trained(self, program: Program, mesh: Mesh) -> History:
        """A program trained on all samples."""
        return on_ranks(program, mesh, self.batches(), self.training())
