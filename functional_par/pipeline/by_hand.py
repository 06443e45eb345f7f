"""A split of the layers that the user wrote: numbers of layers, or their names. Pure."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from functional_par.errors import CompositionError
from functional_par.model import LOSS

Split = Sequence[int | str | Sequence[str]]
"""For each stage its number of layers, or their names: a list, or one text such as ``"embed block0-3"``."""


def check_form(split: Any) -> tuple[int, ...] | tuple[tuple[str, ...], ...]:
    """The split as tuples, before the model is known.

    >>> check_form(["embed block0-3", ["block4", "head"]])
    (('embed', 'block0-3'), ('block4', 'head'))

    Raises:
        CompositionError: neither numbers of at least one nor names, or both at once.
    """
    if isinstance(split, str) or not isinstance(split, Sequence):
        raise CompositionError(
            f"stage_pp(split={split!r}): it is a list with the number of layers of each stage, such as [3, 2], or with their "
            "names, such as ['embed block0-1', 'block2 head']."
        )
    if any(isinstance(stage, (str, list, tuple)) for stage in split):
        return tuple(_words(split, stage) for stage in split)
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in split):
        raise CompositionError(
            f"stage_pp(split={list(split)}): each stage gets an integer number of layers, at least 1."
        )
    return tuple(split)


def _words(split: Sequence[Any], stage: Any) -> tuple[str, ...]:
    words = stage.split() if isinstance(stage, str) else stage
    if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
        raise CompositionError(
            f"stage_pp(split={list(split)}): {stage!r} is not a stage's layers by name. Give every stage as a list of names or "
            "as one text, or every stage as a number."
        )
    return tuple(words)


def sizes_of(split: Sequence[Any], layers: Sequence[str], stages: int, asked: str) -> tuple[int, ...]:
    """Number of layers of each stage.

    Args:
        split: from ``check_form``.
        layers: names of the model's layers in order, without the loss, which is on the last stage.
        stages: number of stages.
        asked: what asks for that number, for messages, such as "Mesh(pp=3) has pp=3".

    Raises:
        CompositionError: another number of stages or layers, or names that are unknown, repeated, missing or out of order.
    """
    order = ", ".join(layers)
    if all(isinstance(n, int) for n in split):
        if len(split) != stages or sum(split) != len(layers):
            raise CompositionError(
                f"stage_pp(split={list(split)}): {len(split)} stages with {sum(split)} layers in all, but {asked}, and the "
                f"model has {len(layers)} layers ({order}). Give a number of layers for each stage, {len(layers)} in all."
            )
        return tuple(split)
    if len(split) != stages:
        raise CompositionError(
            f"stage_pp(split=...): the layers of {len(split)} stages are named, but {asked}. Name those of {stages} stages."
        )
    places = {name: i for i, name in enumerate(layers)}
    named = [list(_expand(words, places, stage)) for stage, words in enumerate(split)]
    _check_order(named, layers)
    return tuple(map(len, named))


def _expand(words: Sequence[str], places: Mapping[str, int], stage: int) -> Iterator[str]:
    """The layers that the words name, ranges such as block0-3 or block0-1,3 written out."""
    if not words:
        raise CompositionError(f"stage_pp(split=...): stage {stage} has no layer; a stage has at least one.")
    for word in words:
        for name in written_out(word, places):
            yield _known(name, places, stage)


def written_out(word: str, known: Container[str]) -> Iterator[str]:
    """The names that a word stands for: itself if it is known, else the numbers of its range one by one.

    >>> list(written_out("block0-1,3", ["embed", "block0"]))
    ['block0', 'block1', 'block3']
    """
    match = None if word in known else re.fullmatch(r"(.*?)(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)(\D*)", word)
    if match is None:
        yield word
        return
    before, numbers, after = match.groups()
    for part in numbers.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield f"{before}{number}{after}"


def _known(name: str, places: Mapping[str, int], stage: int) -> str:
    if name in places:
        return name
    if name == LOSS:
        raise CompositionError(
            f"stage_pp(split=...): stage {stage} names the loss, which is always on the last stage. Leave it out."
        )
    close = get_close_matches(name, places, 1)
    raise CompositionError(
        f"stage_pp(split=...): stage {stage} names {name!r}, which is no layer."
        + (f" Is it {close[0]!r}?" if close else "")
        + f" Layers: {', '.join(places)}."
    )


def _check_order(named: Sequence[Sequence[str]], layers: Sequence[str]) -> None:
    """Every layer once, in the model's order."""
    stage_of: dict[str, int] = {}
    for stage, names in enumerate(named):
        for name in names:
            if name in stage_of:
                raise CompositionError(
                    f"stage_pp(split=...): layer {name!r} is named twice, on stage {stage_of[name]} and on stage {stage}. "
                    "Keep one."
                )
            stage_of[name] = stage
    order = ", ".join(layers)
    if missing := [name for name in layers if name not in stage_of]:
        raise CompositionError(
            f"stage_pp(split=...): of the model's {len(layers)} layers {len(missing)} on no stage: {', '.join(missing)}. "
            f"Order of the layers: {order}."
        )
    for name, expected in zip(stage_of, layers, strict=True):
        if name != expected:
            raise CompositionError(
                f"stage_pp(split=...): stage {stage_of[name]} has {name!r} where {expected!r} comes in the model, which "
                f"stands on stage {stage_of[expected]}. Stages cut the list of layers; they do not reorder it: {order}."
            )
