"""In which dtype each part of a step is done: pure data. See ``functional_par.transforms.precision``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from functional_par.errors import CompositionError

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
_SHORT = {"fp32": "float32", "f32": "float32", "fp64": "float64", "f64": "float64", "bf16": "bfloat16"}

Dtype = torch.dtype | str


@dataclass(frozen=True)
class Precision:
    """The dtypes of a step.

    Attributes:
        compute: of parameters and activations, and of their cotangents.
        accumulate: in which gradients add up over microbatches, and after they are reduced.
        reduce: in which gradients travel between ranks, and are summed there.
        master: of the parameters that the optimizer moves, of which those that compute are rounded copies.
    """

    compute: torch.dtype
    accumulate: torch.dtype
    reduce: torch.dtype
    master: torch.dtype

    @classmethod
    def of(cls, compute: torch.dtype) -> Precision:
        """That of a dtype alone: everything but computation in float32 or better."""
        wide = torch.promote_types(compute, torch.float32)
        return cls(compute, wide, wide, wide)

    @property
    def mastered(self) -> bool:
        """Whether the optimizer keeps parameters of its own."""
        return self.master != self.compute

    @property
    def wire(self) -> torch.dtype | None:
        """The dtype to which gradients are converted before they travel; None leaves them as they are."""
        return None if self.reduce == self.accumulate else self.reduce

    def __str__(self) -> str:
        """In words; what is alike is said together.

        >>> print(Precision.of(torch.bfloat16)), print(Precision.of(torch.float64))
        bfloat16, accumulate, reduce and master in float32
        float64
        (None, None)
        """
        kinds: dict[torch.dtype, list[str]] = {}
        for name in ("accumulate", "reduce", "master"):
            kinds.setdefault(getattr(self, name), []).append(name)
        said = [
            f"{' and '.join([', '.join(names[:-1]), names[-1]] if names[1:] else names)} in {_name(kind)}"
            for kind, names in kinds.items()
            if kind != self.compute
        ]
        return ", ".join([_name(self.compute), *said])


def dtype_of(what: str, given: Any) -> torch.dtype:
    """A dtype by itself or by its name; raises CompositionError that says ``what`` it is."""
    found = DTYPES.get(_SHORT.get(given, given), given) if isinstance(given, str) else given
    if found in (torch.float16, "float16", "fp16"):
        raise CompositionError(
            f"{what}={given!r}: gradients in float16 underflow without loss scaling, which there is not. Take bfloat16, whose "
            "range is that of float32."
        )
    if not isinstance(found, torch.dtype) or found not in DTYPES.values():
        raise CompositionError(f"{what}={given!r}: it is one of {', '.join(DTYPES)}.")
    return found


def chosen(said: Precision | None, dtype: torch.dtype | None, asked: str) -> Precision:
    """The precision of a program whose transforms say one, or none, for a caller who asks for a dtype, or for none.

    Raises:
        CompositionError: both are given, and differ.
    """
    if said is None:
        return Precision.of(torch.float32 if dtype is None else dtype)
    if dtype is not None and dtype != said.compute:
        raise CompositionError(
            f"{asked}(dtype={dtype}): fp.precision of this program says {said}. Leave dtype out, or make them equal."
        )
    return said


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
