"""What a transform is: a frozen value that maps a plan to a plan and names the axes that it takes charge of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from functional_par.model import Model
    from functional_par.plan import Plan


class Transform(ABC):
    """A pure map on plans. Transforms commute: each edits what no other edits.

    Attributes:
        repeatable: whether one program may hold several.
    """

    repeatable: ClassVar[bool] = False

    def on_model(self, model: Model) -> Model:
        """The model with this transform applied, before any plan is made; most leave it alone."""
        return model

    @abstractmethod
    def __call__(self, plan: Plan) -> Plan:
        """The plan with this transform applied."""

    def check(self, plan: Plan) -> None:
        """Raise what only the finished plan reveals."""
        return
