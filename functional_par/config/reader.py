"""Strict YAML: plain data only, each key once, floats as people write them. Nothing here knows which keys exist."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from functional_par.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a repeated key and reads ``1e-4`` as the number that it is in YAML 1.2 and JSON."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in seen and key.tag != "tag:yaml.org,2002:merge":
                raise ConfigError(f"line {line}: the key {name!r} was already given on line {seen[name]}; keep one.")
            seen[name] = line
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


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
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: this is not plain YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        what = "is empty" if data is None else f"holds a {type(data).__name__}"
        raise ConfigError(f"{source}: the file {what}; expected sections such as 'model:' and 'tokens:'.")
    return data


def read(path: str | Path) -> dict[str, Any]:
    """``parse`` of a file; a ConfigError names the path when there is no such file or it is not text."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: the configuration cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: the configuration is not UTF-8 text: {error.reason} at byte {error.start}."
        ) from None
    return parse(text, str(path))
