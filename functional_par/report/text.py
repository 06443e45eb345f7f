"""Words, tables and numbers for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns with a line under the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def fields(shapes: Mapping[str, Sequence[int]]) -> str:
    """Names of fields, each with its shape.

    >>> fields({"tokens": (4, 128), "labels": (4, 128)})
    'tokens 4 128, labels 4 128'
    """
    return ", ".join(f"{name} {' '.join(map(str, shape))}" for name, shape in shapes.items())


def listed(names: Sequence[str]) -> str:
    """Names as a sentence has them.

    >>> listed(["a", "b", "c"]), listed(["a"])
    ('a, b and c', 'a')
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def collapse(names: Iterable[str]) -> str:
    """Names that differ in their first number alone, as one.

    >>> collapse(["embed", "block0", "block1", "block2"])
    'embed block0-2'
    """
    grouped: dict[tuple[str, str], list[int]] = {}
    for name in names:
        match = re.match(r"(\D*)(\d+)(.*)", name)
        before, number, after = match.groups() if match else (name, "-1", "")
        grouped.setdefault((before, after), []).append(int(number))
    return " ".join(f"{a}{ranges(n) if n[0] >= 0 else ''}{b}" for (a, b), n in grouped.items())


def braces(paths: Sequence[str]) -> list[str]:
    """Dotted paths with those that differ in one component alone as one, the last components first.

    >>> braces(["blocks.0.attn.q", "blocks.0.attn.k", "blocks.1.attn.q", "blocks.1.attn.k", "norm"])
    ['blocks.0-1.attn.{q,k}', 'norm']
    """
    split = [tuple(path.split(".")) for path in paths]
    for place in range(max(map(len, split))):
        merged: dict[tuple[str, ...], list[str]] = {}
        for parts in split:
            at = len(parts) - 1 - place
            key = (*parts[:at], "", *parts[at + 1 :]) if at >= 0 else parts
            merged.setdefault(key, []).append(parts[at] if at >= 0 else "")
        split = [tuple(part or _either(options) for part in key) for key, options in merged.items()]
    return [".".join(parts) for parts in split]


def _either(options: Sequence[str]) -> str:
    if len(options) == 1:
        return options[0]
    if all(option.isdigit() for option in options):
        return ranges([int(option) for option in options])
    return "{" + ",".join(options) + "}"


def ranges(numbers: Sequence[int]) -> str:
    """Numbers with runs written as ranges.

    >>> ranges([0, 1, 2, 5])
    '0-2,5'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def size(number: int) -> str:
    """Bytes for people, in powers of 1000.

    >>> size(4096), size(134_000_000)
    ('4.1 kB', '134.0 MB')
    """
    if number < 1000:
        return f"{number} B"
    power = min(4, (len(str(number)) - 1) // 3)
    return f"{number / 1000**power:.1f} {'kMGT'[power - 1]}B"
