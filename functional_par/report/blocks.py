"""Where a picture in characters that is wider than its place is cut: through as few names of actions as may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MOST = 40
"""Blocks below each other. Of a longer picture the first and the last are shown."""
ENDS = 4
"""How many of them, at either end."""


class Bar(NamedTuple):
    """An action in characters: ``first`` to ``end`` of its row, its text from ``first`` on."""

    rank: int
    first: int
    end: int
    text: str
    style: str

    @property
    def named(self) -> int:
        """Where its name ends."""
        return self.first + len(self.text)


class Block(NamedTuple):
    """Columns of the picture, from ``first`` to ``end``; ``left_out`` actions are between the block before and this one."""

    first: int
    end: int
    left_out: int = 0


def blocks(bars: Sequence[Bar], width: int, room: int, step: int) -> list[Block]:
    """The columns from 0 to ``width`` in blocks of at most ``room``, each cut at a multiple of ``step`` where that is possible.

    >>> blocks([Bar(0, at, at + 2, "F0", "") for at in range(0, 14, 2)], 14, 7, 2)
    [Block(first=0, end=6, left_out=0), Block(first=6, end=12, left_out=0), Block(first=12, end=14, left_out=0)]
    """
    if width <= MOST * room:
        return _cut(bars, 0, width, room, step)
    head = _cut(bars, 0, width, room, step, ENDS)
    at = _best(bars, width - ENDS * room, min(step * 2, room), step)
    first, *others = _cut(bars, at, width, room, step)
    left_out = sum(head[-1].end <= bar.first < at for bar in bars)
    return [*head, first._replace(left_out=left_out), *others]


def through(bars: Sequence[Bar], parts: Sequence[Block]) -> bool:
    """Whether a name is on both sides of a cut."""
    cuts = [block.end for block in parts]
    return any(bar.first < at < bar.named for bar in bars for at in cuts)


def _cut(bars: Sequence[Bar], first: int, width: int, room: int, step: int, most: int = 2 * MOST) -> list[Block]:
    found: list[Block] = []
    while first < width and len(found) < most:
        end = width if width - first <= room else _best(bars, first + room, room // 4, step)
        found.append(Block(first, end))
        first = end
    return found or [Block(0, 0)]


def _best(bars: Sequence[Bar], last: int, back: int, step: int) -> int:
    """The best place for a cut, ``last`` or up to ``back`` columns before."""
    near = [bar for bar in bars if bar.first < last and bar.end > last - back]

    def worth(at: int) -> tuple[int, bool, bool, int]:
        names = sum(bar.first < at < bar.named for bar in near)
        action = any(bar.first < at < bar.end for bar in near)
        return names, at % step != 0, action, -at

    return min(range(last, last - back - 1, -1), key=worth)
