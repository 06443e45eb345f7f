"""Where in a user's source something happened, found by walking the stack outwards past library frames."""

from __future__ import annotations

import linecache
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import einops
import torch

import functional_par

_PACKAGE = str(Path(functional_par.__file__).parent)
_OUTSIDE = (str(Path(torch.__file__).parent), str(Path(einops.__file__).parent))
_MACHINERY = tuple(f"{_PACKAGE}/{part}" for part in ("trace/", "par.py", "comm/"))
_BRICKS = f"{_PACKAGE}/nn/"


@dataclass(frozen=True)
class Place:
    """A line of source; ``inside`` names the library function that the line called, if it was one."""

    file: str
    line: int
    inside: str = ""

    def __str__(self) -> str:
        path = Path(self.file)
        shown = f"{path.parent.name}/{path.name}:{self.line}" if path.parent.name else f"{path.name}:{self.line}"
        code = linecache.getline(self.file, self.line).strip()
        inside = f" (in {self.inside})" if self.inside else ""
        return f"{shown}{inside}" + (f": `{code}`" if code else "")

    @classmethod
    def of_exception(cls, error: BaseException) -> Place:
        """The innermost line of the traceback that is not the library's or torch's."""
        frames = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_tb(error.__traceback__)]
        return _first(list(reversed(frames)))


def here() -> Place:
    """The line of a layer function that is running now."""
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        if frame.f_code.co_filename.endswith("trace/infer.py"):
            break
        frame = frame.f_back
    return _first(frames)


def _first(frames: list[tuple[str, int, str]]) -> Place:
    """The first frame, from the inside out, that belongs to the author of the layer."""
    inside = ""
    for file, line, function in frames:
        if file.startswith((*_OUTSIDE, *_MACHINERY)) or file.startswith("<"):
            continue
        if file.startswith(_BRICKS):
            inside = f"fp.nn.{function}"
            continue
        return Place(file, line, inside)
    file, line, _ = frames[-1]
    return Place(file, line)
