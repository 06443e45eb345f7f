"""What is known of tensors, by identity, and which of them share memory."""

from __future__ import annotations

from torch import Tensor

from functional_par.trace.values import CONSTANT, Value

_MARK = "_functional_par_constant"


class Known:
    """The ``Value`` of every tensor of one layer. It holds the tensors, so that no identity and no memory is given to
    another while the trace lasts."""

    def __init__(self) -> None:
        self._values: dict[int, Value] = {}
        self._homes: dict[int, tuple[Tensor, int]] = {}
        self._sharing: dict[int, list[Tensor]] = {}

    def __contains__(self, x: Tensor) -> bool:
        return id(x) in self._values

    def __getitem__(self, x: Tensor) -> Value:
        return self._values[id(x)]

    def value(self, x: Tensor) -> Value | None:
        return self._values.get(id(x))

    def home(self, x: Tensor) -> int:
        """The memory in which a known tensor was when it was noted."""
        return self._homes[id(x)][1]

    def note(self, x: Tensor, value: Value) -> None:
        key, memory = id(x), memory_of(x)
        if self._homes.get(key, (x, None))[1] != memory:
            self._sharing.setdefault(memory, []).append(x)
        self._values[key], self._homes[key] = value, (x, memory)
        # Seen by later traces, to which a constant may come from a cache.
        setattr(x, _MARK, value is CONSTANT or value == CONSTANT)

    def sharing(self, x: Tensor) -> list[Tensor]:
        """The known tensors that are in the same memory."""
        memory = memory_of(x)
        return [y for y in self._sharing.get(memory, ()) if memory_of(y) == memory]

    def forget(self) -> None:
        """Let go of all tensors."""
        for each in (self._values, self._homes, self._sharing):
            each.clear()


def marked_constant(x: Tensor) -> bool:
    """Whether an earlier trace noted the tensor as a constant."""
    return getattr(x, _MARK, False)


def memory_of(x: Tensor) -> int:
    """Identity of the memory that a tensor is in."""
    return x.untyped_storage()._cdata
