"""What an operation returns on meta tensors, worked out once: torch's rules for shapes are Python, and take up to
milliseconds a call. The answers are functions of the question alone, so that they may serve every trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

_META = torch.device("meta")
_PLAIN = (int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_LIKE_INTEGERS = (bool, float, complex)
"""Kinds of numbers that may equal an integer, which is another question: they are asked with their type."""

_NAN = float("nan")
"""Equal to nothing but by identity."""

_UNKNOWN = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
)


class Meta(NamedTuple):
    """All that the shape of a result may depend on."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> Meta:
        return cls(tuple(x.shape), x.stride(), x.dtype)

    @property
    def contiguous(self) -> bool:
        return self.stride == _strides(self.shape)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a new tensor."""
    found: list[int] = []
    expected = 1
    for size in reversed(shape):
        found.append(expected)
        expected *= max(size, 1)
    return tuple(reversed(found))


class _Opaque(Exception):
    """An argument that is no part of a question."""


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``func(*args, **kwargs)`` returns for an operation of torch on meta tensors: new tensors each time."""
    if not pure(func):
        return func(*args, **kwargs)
    try:
        asked = tuple([_frozen(x) for x in args]), tuple([(key, _frozen(x)) for key, x in kwargs.items()])
    except _Opaque:
        return func(*args, **kwargs)
    found = _results(func, torch.get_default_dtype(), *asked)
    if found is None:
        return func(*args, **kwargs)
    return found.empty() if isinstance(found, Meta) else tuple(each.empty() for each in found)


def products(formula: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Floating-point operations by a formula of torch's registry.

    Raises:
        Exception: whatever the formula raises for arguments that it does not know.
    """
    try:
        asked = tuple([_frozen(x) for x in args]), tuple([(key, _frozen(x)) for key, x in kwargs.items()]), _frozen(out)
    except _Opaque:
        return int(formula(*args, **kwargs, out_val=out))
    return _products(formula, *asked)


@lru_cache(maxsize=1 << 10)
def _products(formula: Any, args: Any, kwargs: Any, out: Any) -> int:
    return int(formula(*map(_thawed, args), **{key: _thawed(x) for key, x in kwargs}, out_val=_thawed(out)))


@cache
def pure(func: Any) -> bool:
    """Whether an operation of torch's own returns nothing but new tensors, whose shapes do not depend on numbers."""
    schema = func._schema
    if func.namespace != "aten" or schema.is_mutable or any(tag in func.tags for tag in _UNKNOWN):
        return False
    kinds = [str(each.type) for each in schema.returns]
    aliases = any(each.alias_info for each in (*schema.arguments, *schema.returns))
    return bool(kinds) and all(kind == "Tensor" for kind in kinds) and not aliases


def _frozen(x: Any) -> Any:
    """An argument as a part of a question."""
    kind = type(x)
    if kind is Tensor or kind is torch.nn.Parameter:
        if x.layout is not torch.strided or x.dtype.is_complex or x.is_neg() or not x.is_meta:
            raise _Opaque
        return Meta.of(x)
    if kind in _PLAIN:
        return x
    if kind in _LIKE_INTEGERS:
        return kind, _NAN if x != x else x
    if isinstance(x, (list, tuple)):
        return list, tuple([_frozen(each) for each in x])
    raise _Opaque


def _thawed(x: Any) -> Any:
    if isinstance(x, Meta):
        return x.empty()
    if isinstance(x, tuple):
        return [_thawed(each) for each in x[1]] if x[0] is list else x[1]
    return x


@lru_cache(maxsize=1 << 13)
def _results(func: Any, default: torch.dtype, args: Any, kwargs: Any) -> Meta | tuple[Meta, ...] | None:
    """What an operation returns, given all that this may depend on; None if its results are not plain."""
    if found := _elementwise(func, default, args, kwargs):
        return found
    given = [_thawed(x) for x in args]
    out = func(*given, **{key: _thawed(x) for key, x in kwargs})
    results = [out] if isinstance(out, Tensor) else list(out)
    memory = [x.untyped_storage()._cdata for x in (*given, *results) if isinstance(x, Tensor)]
    if len(set(memory)) < len(memory) or not all(map(_plain, results)):
        return None
    return Meta.of(out) if isinstance(out, Tensor) else tuple(map(Meta.of, results))


def _plain(x: Any) -> bool:
    """Whether a tensor is just what a new one of its shape would be."""
    if type(x) is not Tensor or x.layout is not torch.strided or not x.is_meta or x.is_neg() or x.is_conj():
        return False
    return x.storage_offset() == 0 and x.untyped_storage().nbytes() == Meta.of(x).empty().untyped_storage().nbytes()


def _elementwise(func: Any, default: torch.dtype, args: Any, kwargs: Any) -> Meta | None:
    """The result of an operation on the elements of contiguous tensors has their common shape, and a dtype in which the
    sizes have no part."""
    given = [x for x in args if isinstance(x, Meta)]
    if torch.Tag.pointwise not in func.tags or kwargs or not all(x.contiguous for x in given):
        return None
    shape = _common([x.shape for x in given])
    if shape is None:
        return None
    small = tuple(Meta((1,) * bool(x.shape), (1,) * bool(x.shape), x.dtype) if isinstance(x, Meta) else x for x in args)
    dtype = _dtype(func, default, small)
    return None if dtype is None else Meta(shape, _strides(shape), dtype)


@lru_cache(maxsize=1 << 12)
def _dtype(func: Any, default: torch.dtype, args: Any) -> torch.dtype | None:
    out = func(*map(_thawed, args))
    return out.dtype if type(out) is Tensor and len(out.shape) < 2 else None


def _common(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape to which all are broadcast, if there is one."""
    found: list[int] = []
    for sizes in zip_longest(*map(reversed, shapes), fillvalue=1):
        wide = {size for size in sizes if size != 1}
        if len(wide) > 1:
            return None
        found.append(wide.pop() if wide else 1)
    return tuple(reversed(found)) if shapes else None
