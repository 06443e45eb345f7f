"""Strict YAML: plain data only, each key once, floats as people write them. Nothing here knows which keys exist."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from functional_par.errors import ConfigError

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+")
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+")
_NO_NUMBER = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def integer(text: str) -> int:
    """An integer as YAML 1.2 writes it.

    A leading zero is refused: it means octal in YAML 1.1 and nothing in YAML 1.2. So are 1:20 and 1_000.

    >>> integer("20"), integer("0x10")
    (20, 16)

    Raises:
        ValueError: if it is none.
    """
    if not _INTEGER.fullmatch(text):
        raise ValueError(f"{text!r} is no integer")
    return int(text, 0)


def number(text: str) -> float:
    """A number as YAML 1.2 writes it, integers included. Raises ValueError.

    >>> number("1e-4"), number("3")
    (0.0001, 3.0)
    """
    if _INTEGER.fullmatch(text):
        try:
            return float(integer(text))
        except OverflowError:
            return math.inf
    if _NO_NUMBER.fullmatch(text):
        return float(text.replace(".", ""))
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{text!r} is no number")
    return float(text)


def truth(text: str) -> bool:
    """``true`` or ``false``, in small letters, capitals, or with one. Raises ValueError for yes, no, on and off too."""
    if text not in ("true", "True", "TRUE", "false", "False", "FALSE"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a repeated key and reads words as YAML 1.2 does: 1e-4 is a number, but 1:20, 020, 1_000,
    yes, off and 2024-01-31 are texts, which no key of another type takes."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in seen and key.tag != "tag:yaml.org,2002:merge":
                raise ConfigError(f"line {line}: the key {name!r} was already given on line {seen[name]}; keep one.")
            seen[name] = line
        return super().construct_mapping(node, deep)


def _scalar(read: Callable[[str], Any], loader: _Loader, node: yaml.ScalarNode) -> Any:
    try:
        return read(str(loader.construct_scalar(node)))
    except ValueError as error:
        raise ConfigError(f"line {node.start_mark.line + 1}: {error}.") from None


_Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first, _read in (
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), "tTfF", truth),
    ("int", _INTEGER, "-+0123456789", integer),
    ("float", re.compile(f"{_NUMBER.pattern}|{_NO_NUMBER.pattern}"), "-+.0123456789", number),
    ("null", re.compile(r"~|null|Null|NULL|"), ["~", "n", "N", ""], lambda word: None),
    ("merge", re.compile(r"<<"), "<", None),
):
    # PyYAML matches from the start on; the pattern itself has to say where the word ends.
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"(?:{_pattern.pattern})$"), list(_first))
    if _read is not None:
        _Loader.add_constructor(f"tag:yaml.org,2002:{_name}", partial(_scalar, _read))


def parse(text: str, source: str = "config") -> dict[str, Any]:
    """The mapping that a YAML text holds.

    >>> parse("optimizer: {weight_decay: 1e-2}")
    {'optimizer': {'weight_decay': 0.01}}

    Raises:
        ConfigError: with the place, if the text is not YAML, repeats a key, asks for a Python object, or is no mapping.
    """
    try:
        data = yaml.load(text, Loader=_Loader)  # a SafeLoader: builds plain data only
    except ConfigError as error:
        raise ConfigError(f"{source}, {error}") from None
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{source}: this is not plain YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        what = "is empty" if data is None else f"holds a {type(data).__name__}"
        raise ConfigError(f"{source}: the file {what}; expected sections such as 'model:' and 'tokens:'.")
    return data


def read(path: str | Path) -> dict[str, Any]:
    """``parse`` of a file; a ConfigError names the path when there is no such file or it is not text."""
    if not str(path).strip():
        raise ConfigError(f"{path!r}: the path of a configuration is needed, not an empty text.")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: the configuration cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: the configuration is not UTF-8 text: {error.reason} at byte {error.start}."
        ) from None
    except ValueError as error:
        raise ConfigError(f"{str(path)!r}: the configuration cannot be read: {error}.") from None
    return parse(text, str(path))
