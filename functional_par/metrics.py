"""Loss and gradient norm of the whole world, in one collective, with every shard and every loss counted once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from functional_par.buckets import cut_axes
from functional_par.comm.base import AllReduce, World
from functional_par.errors import ModelError, StateError
from functional_par.mesh import AXES
from functional_par.optim.base import slot_dtype
from functional_par.plan import Plan

HEAD = 5
"""Numbers of a rank before those of its leaves."""


@dataclass(frozen=True)
class Total:
    """Sums over the world.

    Attributes:
        loss: sum of all loss terms.
        count: number of terms that the loss functions returned.
        norm: global gradient norm.
        agreed: whether every rank brought the same number to agree on.
    """

    loss: float
    count: float
    norm: float
    agreed: bool = True

    def check_agreement(self) -> None:
        """Ranks that do not take the same step would drift apart without a word."""
        if not self.agreed:
            raise StateError(
                "the ranks do not take the same step: they differ in the step number or seed of the state, the learning rate, "
                "clip or norm, or the number and shape of rows in the batch. Give every rank the same global batch, optimizer "
                "and seed; what depends on the rank is cut from them by the plan."
            )

    def check_count(self, expected: int) -> None:
        """The loss must have as many terms as were counted before the backward."""
        if self.count != expected:
            raise ModelError(
                f"the loss returned a count of {self.count:g} over the whole batch, but {expected} terms were counted "
                "beforehand, by which gradients are scaled. Pass fp.Model(..., count=...) that counts what the loss counts "
                "(by default: labels that are not -100)."
            )


class Totals:
    """Which of this rank's leaves and losses count, worked out once.

    Each leaf has a slot of its own in the vector that is summed, and slots are added up in the order of the leaves on every
    rank: so the norm does not depend on which stage holds which leaf.
    """

    def __init__(self, plan: Plan, rank: int, norm: float) -> None:
        coords = plan.mesh.coords(rank)
        self.norm = norm
        self.paths = [path for path, spec in plan.specs.items() if spec.trainable]
        self.mine = [
            (i, path)
            for i, path in enumerate(self.paths)
            if coords.pp in plan.specs[path].owners
            and plan.specs[path].counted_by(coords, cut_axes(plan, plan.specs[path]))
        ]
        copied = [axis for axis in AXES if axis != "pp" and axis not in plan.data_axes]
        self.has_loss = coords.pp == plan.placement[-1] and all(getattr(coords, axis) == 0 for axis in copied)

    def over_world(
        self,
        world: World,
        losses: Sequence[tuple[Tensor, Tensor]],
        grads: Mapping[str, Tensor],
        agree: int = 0,
    ) -> Total:
        """Sum over all ranks. For the norm of order inf a second collective takes the maximum.

        Args:
            world: of this rank.
            losses: sum and count of each microbatch, on the rank of the last stage.
            grads: this rank's gradients, debts paid.
            agree: a number of at most 16 bits that should be the same on every rank.
        """
        head, parts = self._head(world, losses, agree), self._powers(world, grads)
        if math.isinf(self.norm):
            head, parts = _reduce(world, head, "sum"), _reduce(world, parts, "max")
        else:
            head, parts = _reduce(world, torch.cat([head, parts]), "sum").split([len(head), len(parts)])
        loss, count, ranks, once, twice = head.tolist()
        return Total(loss, count, self._combine(parts.tolist()), ranks * twice == once**2)

    def of_losses(self, world: World, losses: Sequence[tuple[Tensor, Tensor]], agree: int = 0) -> Total:
        """The same of a batch that was only evaluated: the norm is 0."""
        loss, count, ranks, once, twice = _reduce(world, self._head(world, losses, agree), "sum").tolist()
        return Total(loss, count, 0.0, ranks * twice == once**2)

    def _head(self, world: World, losses: Sequence[tuple[Tensor, Tensor]], agree: int) -> Tensor:
        """This rank's part of loss, count, number of ranks, and what they should agree on."""
        # n * sum(a^2) == sum(a)^2 exactly when all n numbers are equal (Cauchy-Schwarz); 16 bits keep float64 exact.
        head = torch.tensor([0.0, 0.0, 1.0, agree, agree**2], dtype=torch.float64, device=world.device)
        if self.has_loss:
            for total, count in losses:
                head[:2] += torch.stack([total.detach().double(), count.double()])
        return head

    def _powers(self, world: World, grads: Mapping[str, Tensor]) -> Tensor:
        """For each leaf this rank's part of the sum under the root; the largest entry for inf."""
        parts = torch.zeros(len(self.paths), dtype=torch.float64, device=world.device)
        mine = [(i, grads[path]) for i, path in self.mine if grads[path].numel()]  # a slice may be empty
        if mine:
            norms = torch.stack([_norm(grad, self.norm) for _, grad in mine]).double()
            index = torch.tensor([i for i, _ in mine], device=world.device)
            parts[index] = norms if math.isinf(self.norm) else norms**self.norm
        return parts

    def _combine(self, parts: list[float]) -> float:
        if not all(map(math.isfinite, parts)):
            return math.nan
        return max(parts, default=0.0) if math.isinf(self.norm) else math.fsum(parts) ** (1.0 / self.norm)


def clip_coefficient(norm: float, clip: float | None) -> float:
    """What gradients are multiplied with: ``min(1, clip / (norm + 1e-6))``.

    >>> clip_coefficient(0.5, 1.0), clip_coefficient(0.5, None)
    (1.0, 1.0)
    """
    return 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))


def _reduce(world: World, x: Tensor, op: Literal["sum", "max"]) -> Tensor:
    return world.group(*AXES).start(AllReduce(op), x, donate=True).wait()


def _norm(x: Tensor, order: float) -> Tensor:
    """Norm of a tensor, worked out in float32 or better."""
    return torch.linalg.vector_norm(x, order, dtype=slot_dtype(x.dtype))
