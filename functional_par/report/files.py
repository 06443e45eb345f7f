"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from functional_par.errors import ConfigError


def write(path: str, data: bytes, what: str) -> None:
    """Write a file: beside its place first, so that no reader ever sees half of it.

    Args:
        path: where; a link is followed.
        data: all of it.
        what: the flag or key that names the file, for messages.

    Raises:
        ConfigError: with the reason, if it cannot be written. What was there before stays.
    """
    place = Path(path if "\0" in path else os.path.realpath(path))
    if os.path.isdir(place):
        raise ConfigError(f"{what}: {path} is a folder; give the name of a file in it.")
    if os.path.exists(place) and not os.path.isfile(place):
        raise ConfigError(
            f"{what}: {path} is a device or a pipe, which a file must not replace; give the name of a file."
        )
    draft = place.with_name(f".{os.getpid()}.{place.name}"[:250])
    try:
        draft.write_bytes(data)
        os.replace(draft, place)
    except (OSError, ValueError) as error:
        with suppress(OSError, ValueError):
            draft.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"{what}: {path} could not be written: {reason}. Choose another file, or make room."
        ) from None
