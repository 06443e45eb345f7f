"""The training state of one rank: an immutable value, unless it is given away with ``donate=True``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from functional_par import tree
from functional_par.errors import StateError


class State:
    """Step number, parameters and optimizer state of one rank.

    Attributes:
        step: number of steps done.
        seed: what the initial values were drawn from.
        params: nested dict of this rank's shards. A tied leaf appears once, under the name that stands for it. With
            ``dp_reduce(zero=3)`` of each leaf there is this rank's slice, a range of the elements of its flattened shard.
        opt: slot name, then a nested dict of the trainable leaves, with ``zero=1`` and more of this rank's slices.

    Raises:
        StateError: on reading a state that a step with ``donate=True`` has consumed.
    """

    __slots__ = ("_flat", "_opt", "_step", "seed")

    def __init__(
        self, step: int, seed: int, params: Mapping[str, Tensor], opt: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        self._step, self.seed = step, seed
        self._flat: dict[str, Tensor] | None = dict(params)
        self._opt: dict[str, dict[str, Tensor]] | None = {slot: dict(leaves) for slot, leaves in opt.items()}

    @property
    def step(self) -> int:
        return self._step

    @property
    def flat(self) -> dict[str, Tensor]:
        """Parameters by dotted path."""
        return dict(self._alive(self._flat))

    @property
    def flat_opt(self) -> dict[str, dict[str, Tensor]]:
        """Optimizer state: slot, then dotted path."""
        return {slot: dict(leaves) for slot, leaves in self._alive(self._opt).items()}

    @property
    def params(self) -> dict[str, Any]:
        return tree.unflatten(self.flat)

    @property
    def opt(self) -> dict[str, Any]:
        return {slot: tree.unflatten(leaves) for slot, leaves in self.flat_opt.items()}

    def consume(self) -> None:
        """Give the memory away: from here on the state cannot be read."""
        self._flat = self._opt = None

    def _alive(self, value: Any) -> Any:
        if value is None:
            raise StateError(
                f"the state of step {self._step} was consumed by a step with donate=True, which reuses its memory. "
                "Use the state that the step returned, or build the step with donate=False."
            )
        return value

    def __repr__(self) -> str:
        alive = "consumed" if self._flat is None else f"{len(self._flat)} leaves"
        return f"State(step={self._step}, {alive})"
