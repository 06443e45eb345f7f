"""The metrics file: one JSON object a step, a line each, on disk before the next step starts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from functional_par.errors import ConfigError


def check_writable(path: str | None) -> None:
    """Raise ConfigError if the file cannot be made; makes nothing."""
    if path is None:
        return
    folder = Path(path).parent
    if Path(path).is_dir():
        raise ConfigError(f"logging.metrics_file (--metrics-file): {path} is a folder; give the path of a file.")
    if not folder.is_dir():
        raise ConfigError(f"logging.metrics_file (--metrics-file): the folder {folder} does not exist; make it first.")
    if not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise ConfigError(f"logging.metrics_file (--metrics-file): {path} cannot be written; choose another place.")


@contextmanager
def metrics_file(path: str) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A function that writes one record; the file starts empty."""
    with open(path, "w", encoding="utf-8") as file:

        def write(record: Mapping[str, Any]) -> None:
            file.write(encode(record) + "\n")
            file.flush()

        yield write


def encode(record: Mapping[str, Any]) -> str:
    """A record as one line of JSON; numbers that JSON does not have become null.

    >>> encode({"step": 1, "loss": float("nan")})
    '{"step": 1, "loss": null}'
    """
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite, allow_nan=False)
