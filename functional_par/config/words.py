"""Values, types and keys in the words of error messages."""

from __future__ import annotations

import dataclasses
import types
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from functional_par.config.rule import Place, Rule, strip_optional
from functional_par.errors import ConfigError


def expected(hint: Any, rule: Rule) -> str:
    """What a key takes, in words.

    >>> expected(int | None, Rule(low=1))
    'an integer of at least 1, or null'
    """
    if dataclasses.is_dataclass(hint):
        return f"a section with keys such as {some_keys(hint)}"
    inner, optional = strip_optional(hint)
    if rule.choices is not None:
        words = "one of " + ", ".join(str(choice) for choice in rule.choices)
        words += f", or the path of a {rule.files} file" if rule.files else ""
    elif get_origin(inner) is tuple:
        words = f"a list, each {expected(get_args(inner)[0], rule)}"
    elif get_origin(inner) is types.UnionType:
        words = " or ".join(expected(each, rule if each in (int, float) else Rule()) for each in get_args(inner))
    else:
        words = {int: "an integer", float: "a number", bool: "true or false", str: "a text that is not empty"}[
            inner
        ] + _bounds(rule)
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


def some_keys(cls: Any) -> str:
    """The first keys of a section, as examples."""
    return ", ".join(field.name for field in dataclasses.fields(cls)[:4])
