"""A corpus: one long row of token ids, in memory or mapped from a file, whose ids are known to be in the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from functional_par.errors import DataError

_CHUNK = 1 << 22


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids and the size of their vocabulary; all ids are checked when it is made.

    Attributes:
        tokens: ids, one-dimensional, of any integer dtype; a torch tensor is taken as well.
        vocab: ids are 0 to ``vocab - 1``.
        name: what errors call it.

    Raises:
        DataError: if there are no tokens, they are no array of integers, or an id is outside the vocabulary (which one,
            and where).

    >>> len(Corpus(np.array([0, 1, 1, 0]), vocab=2))
    4
    """

    tokens: np.ndarray
    vocab: int
    name: str = "corpus"

    def __post_init__(self) -> None:
        if isinstance(self.tokens, Tensor):
            object.__setattr__(self, "tokens", _array(self.name, self.tokens))
        check_vocab(self.name, self.vocab)
        if not isinstance(self.tokens, np.ndarray):
            raise DataError(
                f"{self.name}: tokens are a {type(self.tokens).__name__}; give a numpy array or a tensor of integers."
            )
        if self.tokens.ndim != 1 or self.tokens.dtype.kind not in "iu":
            raise DataError(
                f"{self.name}: tokens of shape {self.tokens.shape} and dtype {self.tokens.dtype}; "
                f"one dimension of integers is needed."
            )
        if not len(self):
            raise DataError(f"{self.name} is empty: there is nothing to train on.")
        self._check_ids()

    def __len__(self) -> int:
        return len(self.tokens)

    def _check_ids(self) -> None:
        limits = np.iinfo(self.tokens.dtype)
        if limits.min == 0 and limits.max < self.vocab:
            return
        for start, chunk in self._chunks():
            wrong = (chunk < 0) | (chunk >= self.vocab)
            if wrong.any():
                at = int(wrong.argmax())
                raise DataError(
                    f"{self.name}: token id {chunk[at]} at position {start + at} is outside the vocabulary of "
                    f"{self.vocab} (ids 0 to {self.vocab - 1}); give the tokenizer's vocabulary, or the right dtype."
                )

    def _chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        for start in range(0, len(self), _CHUNK):
            yield start, self.tokens[start : start + _CHUNK]

    def _counts(self) -> np.ndarray:
        """How often each id occurs that does. Takes memory for those, not for a vocabulary of any size."""
        ids, counts = np.empty(0, np.int64), np.empty(0, np.int64)
        for _, chunk in self._chunks():
            here, times = _frequencies(chunk.astype(np.int64))
            ids, where = np.unique(np.concatenate([ids, here]), return_inverse=True)
            counts = np.bincount(where, np.concatenate([counts, times])).astype(np.int64)
        return counts

    def unigram_entropy(self) -> float:
        """Entropy of the frequencies of single tokens, in nats: the best loss of a model that sees no context.

        >>> round(Corpus(np.array([0, 1, 2, 3]), vocab=4).unigram_entropy(), 4)
        1.3863
        """
        shares = self._counts() / len(self)
        return max(0.0, -float((shares * np.log(shares)).sum()))


def _frequencies(chunk: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a chunk and how often each occurs; by counting, which is faster than by sorting, unless ids are huge."""
    if chunk.max() > _CHUNK:
        return np.unique(chunk, return_counts=True)
    counts = np.bincount(chunk)
    ids = np.flatnonzero(counts)
    return ids, counts[ids]


def _array(name: str, tokens: Tensor) -> np.ndarray:
    try:
        return tokens.detach().cpu().numpy()
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise DataError(f"{name}: this tensor ({tokens.dtype}, {tokens.device}) cannot be read: {error}.") from None


def check_vocab(name: str, vocab: int) -> None:
    """Raise DataError unless ``vocab`` is a positive integer."""
    if isinstance(vocab, bool) or not isinstance(vocab, int) or vocab < 1:
        raise DataError(f"{name}: vocab = {vocab!r}: an integer of at least 1 is needed.")
