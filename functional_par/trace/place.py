"""Where in a user's source something happened, found by walking the stack outwards past library frames."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import einops
import torch

import functional_par

_PACKAGE = str(Path(functional_par.__file__).parent) + os.sep
_OUTSIDE = tuple(str(Path(module.__file__ or "").parent) + os.sep for module in (torch, einops))
_STANDARD = str(Path(inspect.__file__).parent) + os.sep
_INSTALLED = ("site-packages", "dist-packages")
_GENERATED = ("<frozen ", "<__array_function__", "<eval_with_key>", "<@")
_MACHINERY = tuple(
    _PACKAGE + part
    for part in (f"trace{os.sep}", f"maps{os.sep}", f"audit{os.sep}", f"comm{os.sep}", "par.py", "run_par.py")
)
_BRICKS = f"{_PACKAGE}nn{os.sep}"
_CALLERS = tuple(f"{_PACKAGE}{part}{os.sep}infer.py" for part in ("trace", "maps"))


@dataclass(frozen=True)
class Place:
    """A line of source; ``inside`` names the library function that the line called, if it was one."""

    file: str
    line: int
    inside: str = ""

    def __str__(self) -> str:
        return self._shown

    @functools.cached_property
    def _shown(self) -> str:
        path = Path(self.file)
        shown = f"{path.parent.name}/{path.name}:{self.line}" if path.parent.name else f"{path.name}:{self.line}"
        code = linecache.getline(self.file, self.line).strip()
        inside = f" (in {self.inside})" if self.inside else ""
        return f"{shown}{inside}" + (f": `{code}`" if code else "")

    @classmethod
    def of_exception(cls, error: BaseException) -> Place | None:
        """The innermost line of the traceback that is not the library's or torch's."""
        frames = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_tb(error.__traceback__)]
        return _first(reversed(frames))

    @classmethod
    def of_function(cls, function: Callable[..., Any]) -> Place | None:
        """The line on which a function is defined."""
        while isinstance(function, functools.partial):
            function = function.func
        function = inspect.unwrap(function)
        found = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
        return cls(found.co_filename, found.co_firstlineno) if isinstance(found, CodeType) else None


@dataclass(frozen=True)
class Where:
    """Layer and line of what runs now, which is put into words when there is something to say."""

    layer: str
    place: Place | None
    location: str

    def __str__(self) -> str:
        return f"layer {self.layer!r}, {self.place}" if self.place else self.location


def here() -> Place | None:
    """The line of a layer function that is running now; None in a backward, which runs lines of nobody."""
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename not in _CALLERS:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return _first(frames)


def _first(frames: Iterable[tuple[str, int, str]]) -> Place | None:
    """The first frame, from the inside out, that belongs to the author of the layer."""
    inside = ""
    for file, line, function in frames:
        if _is_passed_over(file):
            continue
        if file.startswith(_BRICKS):
            inside = f"fp.nn.{function}"
            continue
        return Place(file, line, inside)
    return None


@functools.lru_cache(maxsize=1024)
def _is_passed_over(file: str) -> bool:
    """Whether a file belongs to what a layer runs on, or to Python's own library, beside which packages of others lie."""
    if file.startswith((*_OUTSIDE, *_MACHINERY, *_GENERATED)):
        return True
    return file.startswith(_STANDARD) and not file.removeprefix(_STANDARD).startswith(_INSTALLED)
