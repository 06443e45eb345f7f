"""What a key of a section is: its rule beyond the type, its names, and its place in a file."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any, Union, get_args, get_origin


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a value must satisfy beyond its type.

    Attributes:
        low, above, high, below: bounds, inclusive and exclusive.
        choices: the values of an enumeration; strings match in any case, with ``-`` or ``_``.
        canonical: gives the choice that another name stands for; ValueError for a name of none.
        files: the end of the names of files that may be given instead of a choice.
        available: the choices that this version can do; others are refused with ``why``.
        aliases: other names of the key.
    """

    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None
    choices: tuple[Any, ...] | None = None
    canonical: Callable[[str], str] | None = None
    files: str = ""
    available: tuple[Any, ...] | None = None
    why: str = ""
    aliases: tuple[str, ...] = ()


def key(default: Any = MISSING, **rule: Any) -> Any:
    """A field of a section: its default (none: the key is required) and its Rule."""
    return field(default=default, metadata={"rule": Rule(**rule)})


@dataclass(frozen=True)
class Place:
    """Where a value stands, for messages: the file, the dotted key, and what it was called by whoever gave it."""

    source: str
    path: str = ""
    origins: Mapping[str, str] = field(default_factory=dict)

    def __truediv__(self, name: str) -> Place:
        return dataclasses.replace(self, path=f"{self.path}.{name}" if self.path else name)

    def __str__(self) -> str:
        origin = self.origins.get(self.path)
        if origin is not None and origin.startswith("--"):
            return f"{origin} ({self.path})"
        return f"{self.source}: {origin or self.path}".removesuffix(": ")


def strip_optional(hint: Any) -> tuple[Any, bool]:
    """``X | None`` as (X, True), anything else as (itself, False)."""
    if get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint):
        rest = [arg for arg in get_args(hint) if arg is not type(None)]
        return rest[0], True
    return hint, False


def names_of(cls: Any) -> dict[str, dataclasses.Field[Any]]:
    """Every name and alias of a key, to its field."""
    return {name: f for f in dataclasses.fields(cls) for name in (f.name, *rule_of(f).aliases)}


def rule_of(target: dataclasses.Field[Any]) -> Rule:
    """The Rule of a field; one that forbids nothing if it has none."""
    return target.metadata.get("rule", Rule())
