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

KEY = "logging.metrics_file (--metrics-file)"


def check_writable(path: str | None, key: str = KEY) -> None:
    """Raise ConfigError, naming the key, if the file cannot be made; makes nothing."""
    if path is None:
        return
    try:
        wrong = _wrong(Path(path))
    except OSError as error:
        raise _cannot(path, error, key) from None
    if wrong:
        raise ConfigError(f"{key}: {wrong}")


def _wrong(path: Path) -> str | None:
    if "\0" in str(path):
        return f"{str(path)!r} is no name of a file: it has a null byte."
    if path.is_dir():
        return f"{path} is a folder; give the path of a file."
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist; make it first."
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"{path} cannot be written; choose another place."
    return None


@contextmanager
def metrics_file(path: str) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A function that writes one record; the file starts empty.

    Raises:
        ConfigError: with the reason, as soon as the file cannot be opened or a record cannot be written.
    """
    # Without a buffer: what could not be written must not be tried once more, and fail once more, when the file closes.
    with _told(path):
        file = open(path, "wb", buffering=0)  # noqa: SIM115

    def write(record: Mapping[str, Any]) -> None:
        rest = encode(record).encode() + b"\n"
        with _told(path):
            while rest:
                rest = rest[file.write(rest) :]

    try:
        yield write
    finally:
        with _told(path):
            file.close()


@contextmanager
def _told(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _cannot(path, error) from None


def _cannot(path: str, error: OSError, key: str = KEY) -> ConfigError:
    return ConfigError(
        f"{key}: {path} cannot be written: {error.strerror or error}. Make room, or choose another place."
    )


def encode(record: Mapping[str, Any]) -> str:
    """A record as one line of JSON; numbers that JSON does not have become null.

    >>> encode({"step": 1, "loss": float("nan")})
    '{"step": 1, "loss": null}'
    """
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite, allow_nan=False)
