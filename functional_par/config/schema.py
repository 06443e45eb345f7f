"""From plain data to frozen dataclasses: every key known, every value of the right type and range, or an error that
names the key, the value and what was expected. Nothing here knows the sections.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from difflib import get_close_matches
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from functional_par.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a value must satisfy beyond its type.

    Attributes:
        low, above, high, below: bounds, inclusive and exclusive.
        choices: the values of an enumeration; strings match in any case, with ``-`` or ``_``.
        available: the choices that this version can do; others are refused with ``why``.
        aliases: other names of the key.
    """

    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None
    choices: tuple[Any, ...] | None = None
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


def build(cls: type[T], data: Any, at: Place) -> T:
    """An instance of the dataclass ``cls`` from a mapping; null stands for a section of defaults.

    Raises:
        ConfigError: for an unknown, repeated or missing key, and for a value of a wrong type or out of range.
    """
    data = {} if data is None else data
    if not isinstance(data, Mapping):
        raise ConfigError(f"{at}: got {shown(data)}; expected a section with keys such as {_some_keys(cls)}.")
    known, hints = _names(cls), get_type_hints(cls)
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name not in known:
            raise unknown_key(at, name, list(known))
        target = known[name]
        here = at / (target.name if (at / target.name).path in at.origins else name)
        converted = convert(hints[target.name], target.metadata.get("rule", Rule()), value, here)
        if values.setdefault(target.name, converted) != converted:
            raise ConfigError(
                f"{here} is {shown(converted)}, but the same key is {values[target.name]} under another name."
            )
    for target in dataclasses.fields(cls):  # type: ignore[arg-type]
        if target.name not in values and target.default is MISSING and target.default_factory is MISSING:
            raise ConfigError(f"{at / target.name} is missing: expected {expected(hints[target.name], _rule(target))}.")
    return cls(**values)


def convert(hint: Any, rule: Rule, value: Any, at: Place) -> Any:
    """``value`` as the annotated type, checked against the rule; raises ConfigError."""
    if dataclasses.is_dataclass(hint):
        return build(hint, value, at)  # type: ignore[arg-type]
    inner, optional = _strip_optional(hint)
    if value is None and optional:
        return None
    result = _typed(inner, rule, value, at)
    if result is MISSING or not _in_range(rule, result):
        raise ConfigError(f"{at}: got {shown(value)}; expected {expected(hint, rule)}.")
    if rule.available is not None and result not in rule.available:
        allowed = " or ".join(shown(v) for v in rule.available)
        raise ConfigError(f"{at}: {shown(value)} is not available yet: {rule.why}. Set it to {allowed}.")
    return result


def _typed(kind: Any, rule: Rule, value: Any, at: Place) -> Any:
    """The value as ``kind``, or MISSING when it is of another type or none of the choices."""
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            return MISSING
        items = [_typed(get_args(kind)[0], rule, item, at) for item in value]
        return MISSING if any(item is MISSING or not _in_range(rule, item) for item in items) else tuple(items)
    if isinstance(value, bool) is not (kind is bool):
        return MISSING
    if kind is float and isinstance(value, int | float):
        try:
            return float(value) if math.isfinite(value) else MISSING
        except OverflowError:
            return MISSING
    if not isinstance(value, kind):
        return MISSING
    return value if rule.choices is None else _choice(rule.choices, value)


def _choice(choices: tuple[Any, ...], value: Any) -> Any:
    return next((choice for choice in choices if _plain(choice) == _plain(value)), MISSING)


def _plain(value: Any) -> Any:
    return value.lower().replace("-", "_") if isinstance(value, str) else value


def _in_range(rule: Rule, value: Any) -> bool:
    if not isinstance(value, int | float):
        return True
    return (
        (rule.low is None or value >= rule.low)
        and (rule.above is None or value > rule.above)
        and (rule.high is None or value <= rule.high)
        and (rule.below is None or value < rule.below)
    )


def expected(hint: Any, rule: Rule) -> str:
    """What a key takes, in words.

    >>> expected(int | None, Rule(low=1))
    'an integer of at least 1, or null'
    """
    if dataclasses.is_dataclass(hint):
        return f"a section with keys such as {_some_keys(hint)}"
    inner, optional = _strip_optional(hint)
    if rule.choices is not None:
        words = "one of " + ", ".join(str(choice) for choice in rule.choices)
    elif get_origin(inner) is tuple:
        words = f"a list, each {expected(get_args(inner)[0], rule)}"
    else:
        words = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}[inner] + _bounds(rule)
    return words + (", or null" if optional else "")


def _bounds(rule: Rule) -> str:
    limits = {"of at least": rule.low, "above": rule.above, "of at most": rule.high, "below": rule.below}
    words = " and ".join(f"{word} {limit}" for word, limit in limits.items() if limit is not None)
    return f" {words}" if words else ""


def unknown_key(at: Place, name: Any, known: list[str]) -> ConfigError:
    """The error for a key that nobody reads, with the nearest one that somebody does."""
    near = get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"the keys here are {', '.join(known)}."
    return ConfigError(f"{at / str(name)} is unknown: {hint}")


def shown(value: Any) -> str:
    """A value as its writer would recognise it, with its type, at most 60 characters long."""
    text = {None: "null", True: "true", False: "false"}.get(value) if isinstance(value, bool | None) else repr(value)
    text = str(text)
    short = text if len(text) <= 60 else text[:57] + "..."
    return short if isinstance(value, bool | int | float | None) else f"{short} ({_kind(value)})"


def _kind(value: Any) -> str:
    names: dict[type, str] = {str: "a text", list: "a list", tuple: "a list", dict: "a section"}
    return names.get(type(value), f"a {type(value).__name__}")


def _strip_optional(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) in (Union, types.UnionType):
        rest = [arg for arg in get_args(hint) if arg is not type(None)]
        return rest[0], True
    return hint, False


def _names(cls: Any) -> dict[str, dataclasses.Field[Any]]:
    """Every name and alias of a key, to its field."""
    return {name: f for f in dataclasses.fields(cls) for name in (f.name, *_rule(f).aliases)}


def _rule(target: dataclasses.Field[Any]) -> Rule:
    return target.metadata.get("rule", Rule())


def _some_keys(cls: Any) -> str:
    return ", ".join(list(_names(cls))[:4])


def dotted_keys(cls: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a dataclass of sections."""
    hints = get_type_hints(cls)
    for name, target in _names(cls).items():
        if dataclasses.is_dataclass(hints[target.name]):
            yield from dotted_keys(hints[target.name], f"{prefix}{name}.")
        else:
            yield prefix + name


def override(cls: Any, data: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``data`` with the value at each dotted key replaced, whatever the key was called there.

    >>> @dataclass(frozen=True)
    ... class Parallelism:
    ...     cp: int = key(1, aliases=("context_parallel_size",))
    >>> override(Parallelism, {"context_parallel_size": 4}, {"cp": 2})
    {'cp': 2}
    """
    result = dict(data)
    for path, value in values.items():
        first, _, rest = path.partition(".")
        target = _names(cls).get(first)
        names = (first,) if target is None else (target.name, *_rule(target).aliases)
        held = [result.pop(name) for name in names if name in result]
        inner = held[0] if held and held[0] is not None else {}
        if rest and target is not None and isinstance(inner, Mapping):
            value = override(get_type_hints(cls)[target.name], inner, {rest: value})
        result[names[0]] = inner if rest and not isinstance(inner, Mapping) else value
    return result
