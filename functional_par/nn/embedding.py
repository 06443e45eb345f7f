"""Embedding look-up in a table whose rows are split over tp."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_par.errors import DataError, ModelError
from functional_par.nn.captured import captured_rows
from functional_par.nn.stream import to_stream
from functional_par.par import Par


def embedding(ids: Tensor, weight: Tensor, par: Par, *, vocab: int, seq_dim: int = 1) -> Tensor:
    """``weight[ids]`` with the vocabulary split over tp: each rank looks up the ids it holds, and tp sums.

    Args:
        ids: integers [batch, seq], the same on every tp rank.
        weight: this rank's rows, [ceil(vocab / tp), embed].
        vocab: number of rows of the whole table, without padding.

    Returns:
        The stream, [batch, seq, embed] (seq is the local window in REDUCE_SCATTER).

    Raises:
        DataError: for an id outside [0, vocab), on CPU. On other devices, where looking would wait for the device, the
            row is not a number, which the step notices in the loss.
        ModelError: for a table of another size, ids that are not integers, or a sequence that tp does not divide in
            REDUCE_SCATTER.

    >>> from functional_par.run_par import RunPar
    >>> embedding(torch.tensor([[2, 0]]), torch.tensor([[1.0], [2.0], [3.0]]), RunPar(), vocab=3)
    tensor([[[3.],
             [1.]]])
    """
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ModelError(f"embedding: ids are {ids.dtype}; give integers.")
    check_vocab("embedding", weight.shape[0], vocab, par)
    check_range("token id", ids, vocab)
    return par.kernel(_definition, _fast)(ids, weight, par, vocab, seq_dim)


def check_vocab(name: str, rows: int, vocab: int, par: Par) -> None:
    """ModelError unless a shard has ceil(vocab / tp) rows."""
    tp = par.size("tp")
    if rows != -(-vocab // tp):
        raise ModelError(
            f"{name}: vocab={vocab} over tp={tp} is {-(-vocab // tp)} entries a rank (padded), "
            f"but this rank has {rows}. Give the whole number of entries as vocab, and in fp.Param name their dim 'vocab', "
            "which shard_tp cuts and pads."
        )


def check_range(what: str, ids: Tensor, vocab: int, ignore_index: int | None = None) -> None:
    """DataError that names the first id outside [0, vocab). Looks on CPU alone, where it costs no wait, and not in a compiled
    layer, which it would cut in two."""
    if ids.device.type != "cpu" or ids.numel() == 0 or torch.compiler.is_compiling():
        return
    outside = (ids < 0) | (ids >= vocab)
    if ignore_index is not None:
        outside &= ids != ignore_index
    if bool(outside.any()):
        position = outside.nonzero()[0].tolist()
        ignored = "" if ignore_index is None else f", or {ignore_index} to ignore the position"
        raise DataError(
            f"{what} {int(ids[tuple(position)])} at {position} is outside the vocabulary: vocab={vocab} allows 0 to "
            f"{vocab - 1}{ignored}. Check the tokenizer, or make the vocabulary larger."
        )


def _definition(
    ids: Tensor,
    weight: Tensor,
    par: Par,
    vocab: int,
    seq_dim: int,
    look_up: Callable[[Tensor, Tensor], Tensor] = F.embedding,
) -> Tensor:
    local = ids - par.axis_index("tp") * weight.shape[0]
    mine = (local >= 0) & (local < weight.shape[0])
    rows = look_up(torch.where(mine, local, 0), weight)
    # One product hides the rows of others, and poisons those of ids that nobody holds.
    keep = mine.to(weight.dtype).masked_fill((ids < 0) | (ids >= vocab), torch.nan)
    return to_stream(rows * keep.unsqueeze(-1), par, seq_dim)


def _fast(ids: Tensor, weight: Tensor, par: Par, vocab: int, seq_dim: int) -> Tensor:
    def look_up(ids: Tensor, weight: Tensor) -> Tensor:
        rows = captured_rows(ids, weight, par)
        return F.embedding(ids, weight) if rows is None else rows

    if par.size("tp") == 1:
        return look_up(ids, weight)
    return _definition(ids, weight, par, vocab, seq_dim, look_up)
