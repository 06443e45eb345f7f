"""Dropout whose mask is a function of the step's key and of the global position, so that every layout drops the same."""

from __future__ import annotations

import torch
from torch import Tensor

from functional_par.errors import ModelError
from functional_par.par import Par
from functional_par.random import Key, bits


def dropout(x: Tensor, rate: float, par: Par, salt: int | str, *, seq_dim: int = 1) -> Tensor:
    """Zero each element of the stream with probability ``rate`` and scale the others by ``1 / (1 - rate)``. No random state:
    the bits of an element follow from (seed, step), the layer's name, ``salt`` and the element's place in the global batch.
    The same call in the same step gives the same mask; a rate of 0 is the identity and costs nothing.

    Args:
        x: the stream, [batch, seq, embed]: whole in ALL_REDUCE, this rank's window of the sequence in REDUCE_SCATTER.
        rate: in [0, 1).
        salt: tells the dropouts of one layer apart.
        seq_dim: which dim of ``x`` is the sequence; dim 0 is the rows of the microbatch.

    Raises:
        ModelError: for a rate outside [0, 1), another number of rows than ``par.batch`` has, or, in the trace, a value
            that cannot be the stream by its type (in ALL_REDUCE one that is cut over tp, such as hidden features, of which
            every rank would drop the same; in REDUCE_SCATTER one that is whole).

    Source: Srivastava et al. 2014, in the inverted form.

    >>> from functional_par.run_par import RunPar
    >>> par = RunPar(batch={"tokens": torch.zeros(1, 2)})
    >>> dropout(torch.ones(1, 2, 4), 0.5, par, "mlp")
    tensor([[[2., 0., 2., 2.],
             [0., 2., 2., 0.]]])
    """
    if not 0 <= rate < 1:
        raise ModelError(f"dropout: rate={rate!r}: a probability in [0, 1) is needed.")
    if rate == 0:
        return x
    rows = par.rows
    if x.shape[0] != rows.shape[0]:
        raise ModelError(
            f"dropout: x of shape {list(x.shape)} has not the {rows.shape[0]} rows of par.batch in dim 0. Its mask is a "
            "function of the row: keep the rows in dim 0 and the sequence in seq_dim."
        )
    par.check_stream(x, "dropout")
    keep = _keep(x.shape, rate, par, par.layer_key.fold(salt), rows, seq_dim % x.ndim, x.device)
    return torch.where(keep, x * (1 / (1 - rate)), 0.0)


def _keep(
    shape: torch.Size, rate: float, par: Par, key: Key, rows: Tensor, seq_dim: int, device: torch.device
) -> Tensor:
    """The mask, boolean, of the shape of the stream: ``bits >= threshold`` at each element's global index."""
    whole = list(shape)
    places = [rows, *(torch.arange(size, device=device) for size in shape[1:])]
    if par.sequence_split:
        whole[seq_dim] *= par.size("tp")
        places[seq_dim] = places[seq_dim] + par.axis_index("tp") * shape[seq_dim]
    index = rows
    for size, place in zip(whole[1:], places[1:], strict=True):
        index = index.unsqueeze(-1) * size + place
    return bits(key, index) >= int(rate * 2**64) - 2**63
