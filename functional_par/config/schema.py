"""From plain data to frozen dataclasses: every key known, every value of the right type and range, or an error that
names the key, the value and what was expected. Nothing here knows the sections.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from functional_par.config.rule import Place, Rule, names_of, rule_of, strip_optional
from functional_par.config.words import expected, shown, some_keys, unknown_key
from functional_par.errors import ConfigError

T = TypeVar("T")


def build(cls: type[T], data: Any, at: Place) -> T:
    """An instance of the dataclass ``cls`` from a mapping; null stands for a section of defaults.

    Raises:
        ConfigError: for an unknown, repeated or missing key, and for a value of a wrong type or out of range.
    """
    data = {} if data is None else data
    if not isinstance(data, Mapping):
        raise ConfigError(f"{at}: got {shown(data)}; expected a section with keys such as {some_keys(cls)}.")
    known, hints = names_of(cls), get_type_hints(cls)
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name not in known:
            raise unknown_key(at, name, list(known))
        target = known[name]
        here = at / (target.name if (at / target.name).path in at.origins else name)
        converted = convert(hints[target.name], rule_of(target), value, here)
        if values.setdefault(target.name, converted) != converted:
            raise ConfigError(
                f"{here} is {shown(converted)}, but the same key is {values[target.name]} under another name."
            )
    for target in dict.fromkeys(known.values()):
        if target.name not in values and target.default is MISSING and target.default_factory is MISSING:
            raise ConfigError(
                f"{at / target.name} is missing: expected {expected(hints[target.name], rule_of(target))}."
            )
    return cls(**values)


def convert(hint: Any, rule: Rule, value: Any, at: Place) -> Any:
    """``value`` as the annotated type, checked against the rule; raises ConfigError."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return build(hint, value, at)
    inner, optional = strip_optional(hint)
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
    if get_origin(kind) is types.UnionType:
        found = (_typed(each, rule, value, at) for each in get_args(kind))
        return next((item for item in found if item is not MISSING), MISSING)
    if isinstance(value, bool) is not (kind is bool):
        return MISSING
    if kind is float and isinstance(value, int | float):
        try:
            return float(value) if math.isfinite(value) else MISSING
        except OverflowError:
            return MISSING
    if not isinstance(value, kind):
        return MISSING
    if rule.choices is not None:
        return _choice(rule, value)
    # Every free text is a path or a pattern: an empty one would be the current folder, or match all.
    return MISSING if kind is str and not value.strip() else value


def _choice(rule: Rule, value: Any) -> Any:
    if rule.files and isinstance(value, str) and value.endswith(rule.files):
        return value
    found = next((choice for choice in rule.choices or () if _plain(choice) == _plain(value)), MISSING)
    if found is MISSING and rule.canonical is not None:
        try:
            return rule.canonical(value)
        except ValueError:
            return MISSING
    return found


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


def override(cls: Any, data: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``data`` with the value at each dotted key replaced, whatever the key was called there.

    >>> from functional_par.config.rule import key
    >>> @dataclasses.dataclass(frozen=True)
    ... class Parallelism:
    ...     cp: int = key(1, aliases=("context_parallel_size",))
    >>> override(Parallelism, {"context_parallel_size": 4}, {"cp": 2})
    {'cp': 2}
    """
    result = dict(data)
    for path, value in values.items():
        first, _, rest = path.partition(".")
        target = names_of(cls).get(first)
        names = (first,) if target is None else (target.name, *rule_of(target).aliases)
        held = [result.pop(name) for name in names if name in result]
        inner = held[0] if held and held[0] is not None else {}
        if rest and target is not None and isinstance(inner, Mapping):
            value = override(get_type_hints(cls)[target.name], inner, {rest: value})
        result[names[0]] = inner if rest and not isinstance(inner, Mapping) else value
    return result
