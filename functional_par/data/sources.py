"""Where token ids come from: the standard library of this Python, text (a byte is a token), or a file of ids.

Nothing is downloaded, written, or unpickled.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from functional_par.data.corpus import Corpus
from functional_par.errors import DataError

_BYTES = 256
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"})


def stdlib_text(max_bytes: int = 8 << 20) -> Corpus:
    """Bytes of the source files of Python's own standard library, in the order of their paths, tests left out.

    The same on every machine with the same version of Python. ``max_bytes`` cuts it.

    Raises:
        DataError: if this Python comes without its sources.
    """
    if not isinstance(max_bytes, int) or max_bytes < 1:
        raise DataError(f"stdlib_text(max_bytes={max_bytes!r}): an integer of at least 1 is needed.")
    root = Path(sysconfig.get_path("stdlib"))
    parts, size = [], 0
    for path in _files(root, lambda folder: folder not in _SKIPPED):
        if size >= max_bytes:
            break
        if path.suffix == ".py" and not path.name.startswith("_sysconfigdata"):
            parts.append(path.read_bytes())
            size += len(parts[-1])
    if not parts:
        raise DataError(f"{root}: this Python comes without the sources of its standard library; name a text file.")
    return Corpus(np.frombuffer(b"".join(parts)[:max_bytes], dtype=np.uint8), _BYTES, "standard library")


def load_text(path: str | Path) -> Corpus:
    """Bytes of a text file (mapped, not read), or of all files in a folder and below it, in the order of their paths.

    Hidden files are left out.

    Raises:
        DataError: if there is no such file, it cannot be read, is empty, or is not text.
    """
    path = _existing(path)
    try:
        if path.is_dir():
            data = b"".join(file.read_bytes() for file in _files(path, _visible) if _visible(file.name))
            tokens = np.frombuffer(data, dtype=np.uint8)
        else:
            tokens = _map(path, np.dtype(np.uint8))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    zero = np.flatnonzero(tokens[: 1 << 20] == 0)
    if len(zero):
        raise DataError(f"{path} is not text: byte {zero[0]} is zero. For token ids use load_tokens.")
    return Corpus(tokens, _BYTES, str(path))


def load_tokens(path: str | Path, vocab: int, dtype: DTypeLike | None = None) -> Corpus:
    """Token ids from a file, mapped rather than read: ``.npy`` (a one-dimensional integer array), or else raw
    little-endian numbers of ``dtype`` uint16 or uint32.

    Raises:
        DataError: if there is no such file, it is malformed or empty, or an id is outside the vocabulary.
    """
    path = _existing(path)
    if path.is_dir():
        raise DataError(f"{path} is a folder; name one file of token ids.")
    try:
        tokens = _load_npy(path, dtype) if path.suffix == ".npy" else _map(path, _raw_dtype(path, dtype))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    return Corpus(tokens, vocab, str(path))


def _load_npy(path: Path, dtype: DTypeLike | None) -> np.ndarray:
    try:
        # Not numpy.load, which takes archives and pickles for token files too.
        tokens = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError) as error:
        raise DataError(
            f"{path} is not a .npy file of integers: {error}. Save one array of integers with numpy.save."
        ) from error
    if dtype is not None and tokens.dtype != _known_dtype(dtype):
        raise DataError(f"{path} holds {tokens.dtype}, not {dtype}; leave dtype out for .npy files.")
    return tokens


def _known_dtype(dtype: DTypeLike | None) -> np.dtype | None:
    try:
        return None if dtype is None else np.dtype(dtype)
    except TypeError:
        return None


def _raw_dtype(path: Path, dtype: DTypeLike | None) -> np.dtype:
    allowed = (np.dtype("<u2"), np.dtype("<u4"))
    known = _known_dtype(dtype)
    chosen = None if known is None else known.newbyteorder("<")
    if chosen not in allowed:
        raise DataError(f"{path} with dtype {dtype!r}: raw token ids need dtype='uint16' or 'uint32'.")
    return chosen


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise DataError(f"{path} has {size} bytes, which is no whole number of {dtype} ({dtype.itemsize} bytes each).")
    return np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype)


def _existing(path: str | Path) -> Path:
    if not isinstance(path, str | Path) or not str(path).strip():
        raise DataError(f"{path!r} is no path; give the path of a file or folder.")
    try:
        path = Path(path).expanduser()
        if path.exists():
            return path
        where = "" if path.is_absolute() else f" (looked for {path.absolute()})"
        near = _nearest(path)
    except (OSError, RuntimeError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    raise DataError(f"{path} does not exist{where}; give the path of a file or folder{near}.")


def _nearest(path: Path) -> str:
    folder = next((parent for parent in path.parents if parent.is_dir()), None)
    return f" (the folder {folder} does)" if folder and folder != Path(".") else ""


def _visible(name: str) -> bool:
    return not name.startswith(".")


def _files(root: Path, enter: Callable[[str], bool]) -> list[Path]:
    """Files in ``root`` and in those folders below it that ``enter`` accepts, in the order of their paths."""
    found = []
    for folder, below, files in os.walk(root):
        below[:] = filter(enter, below)
        found += [Path(folder, file) for file in files]
    return sorted(found, key=lambda path: path.relative_to(root).parts)
