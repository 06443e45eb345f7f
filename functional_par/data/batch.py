"""Batches of next-token prediction. Global sample ``k`` is a pure function of (seed, k): whatever the layout and the
batch size, samples come in the same order, and resuming needs just the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from functional_par.data.corpus import Corpus
from functional_par.data.permutation import shuffled
from functional_par.errors import DataError


@dataclass(frozen=True, eq=False)
class Batch:
    """The global batch of one step; rows are read when asked for, and just those.

    Attributes:
        corpus: where tokens come from.
        step: number of the step, from 0.
        size: number of rows over all ranks.
        seq_len: tokens in a row.
        seed: chooses the order.
    """

    corpus: Corpus
    step: int
    size: int
    seq_len: int
    seed: int = 0

    def rows(self, start: int, stop: int) -> dict[str, Tensor]:
        """Rows ``start`` to ``stop``: "tokens" and "labels", int64 [stop - start, seq_len]. A label is the next token.

        Raises:
            DataError: if the batch has no such rows.
        """
        if not 0 <= start <= stop <= self.size:
            raise DataError(f"rows {start} to {stop} of the batch of step {self.step}, which has {self.size} rows.")
        first = self.step * self.size
        samples = range(first + start, first + stop)
        text = np.empty((stop - start, self.seq_len + 1), dtype=np.int64)
        for row, window in enumerate(shuffled(self.seed, samples, windows(self.corpus, self.seq_len))):
            text[row] = self.corpus.tokens[window * self.seq_len : (window + 1) * self.seq_len + 1]
        whole = torch.from_numpy(text)
        return {"tokens": whole[:, :-1].contiguous(), "labels": whole[:, 1:].contiguous()}

    def all(self) -> dict[str, Tensor]:
        """Every row, as a plain dict."""
        return self.rows(0, self.size)


def windows(corpus: Corpus, seq_len: int) -> int:
    """Number of windows of ``seq_len`` tokens that do not overlap and are followed by one more token.

    Raises:
        DataError: if there is none.
    """
    _at_least("seq_len", seq_len, 1)
    number = (len(corpus) - 1) // seq_len
    if number < 1:
        raise DataError(
            f"{corpus.name} has {len(corpus)} tokens, too few for seq_len = {seq_len}: a row and its labels need "
            f"{seq_len + 1}. Give more text, or seq_len of at most {len(corpus) - 1}."
        )
    return number


def batches(
    corpus: Corpus, *, batch_size: int, seq_len: int, seed: int = 0, start: int = 0, steps: int | None = None
) -> Iterator[Batch]:
    """The batches of steps ``start``, ``start + 1``, ...: ``steps`` of them, or without end.

    Windows of the corpus do not overlap; each epoch reads every window once, in an order of its own. An epoch may end
    within a batch.

    Raises:
        DataError: if the corpus is too short for ``seq_len``, or a number is out of its range.

    >>> corpus = Corpus(np.arange(9), vocab=9)
    >>> [batch.rows(0, 1)["labels"].shape for batch in batches(corpus, batch_size=2, seq_len=4, steps=1)]
    [torch.Size([1, 4])]
    """
    for name, value, least in (("batch_size", batch_size, 1), ("start", start, 0), ("steps", steps or 0, 0)):
        _at_least(name, value, least)
    if not isinstance(corpus, Corpus):
        raise DataError(f"corpus is a {type(corpus).__name__}; make a fp.data.Corpus of it, or load one.")
    windows(corpus, seq_len)
    numbers = count(start) if steps is None else range(start, start + steps)
    return (Batch(corpus, step, batch_size, seq_len, seed) for step in numbers)


def _at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DataError(f"{name} = {value!r}: an integer of at least {least} is needed.")
