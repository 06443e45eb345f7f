"""Each replica's share of a global batch, read and cut, or refused."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

import functional_par as fp
from functional_par import DataError, Input, Mesh, Model, Param
from functional_par.batch import share_of

from .toys import regression


def plan_of(mesh, microbatches=1, model=None):
    return fp.compose(fp.dp_reduce(), fp.stage_pp(microbatches=microbatches), fp.shard_tp(dims={}))(
        model or regression()
    ).plan(mesh)


def share(mesh, batch, rank=0, dtype=torch.float64, **options):
    return share_of(plan_of(mesh, **options), SimpleNamespace(rank=rank, device=torch.device("cpu")), batch, dtype)


def numbered(rows):
    return {
        "x": torch.arange(rows * 3, dtype=torch.float64).view(rows, 3),
        "y": torch.arange(rows, dtype=torch.float64),
    }


class Rows:
    """A global batch of which rows are read on demand; remembers which."""

    def __init__(self, size, wrong=0):
        self.size, self.read, self.wrong = size, [], wrong

    def rows(self, start, stop):
        self.read.append((start, stop))
        return {name: x[start : stop + self.wrong] for name, x in numbered(self.size).items()}


def test_every_row_is_read_by_the_replica_it_belongs_to_in_order():
    mesh = Mesh(ep=2, pp=2, dp=3, tp=2)
    batch = numbered(24)
    for rank, coords in enumerate(mesh):
        mine = share(mesh, batch, rank, microbatches=2)
        replica = coords.ep * 3 + coords.dp
        assert mine.rows == 2
        assert torch.equal(mine.fields["y"], batch["y"][4 * replica : 4 * replica + 4])
        for i in range(2):
            start = 4 * replica + 2 * i
            assert torch.equal(mine.microbatch(i)["x"], batch["x"][start : start + 2])
        assert mine.shapes() == {"x": ((2, 3), torch.float64), "y": ((2,), torch.float64)}


def test_a_batch_with_rows_is_read_once_for_this_replica_alone():
    mesh = Mesh(dp=4)
    for rank in range(4):
        batch = Rows(8)
        mine = share(mesh, batch, rank, microbatches=2)
        assert batch.read == [(2 * rank, 2 * rank + 2)]
        assert torch.equal(mine.fields["y"], numbered(8)["y"][2 * rank : 2 * rank + 2])


REFUSED = [
    (None, "a batch is a dict of tensors, or has .size and .rows(start, stop); this is NoneType."),
    ([1, 2], "a batch is a dict of tensors, or has .size and .rows(start, stop); this is list."),
    (torch.ones(4), "a batch is a dict of tensors, or has .size and .rows(start, stop); this is Tensor."),
    (numbered(4) | {"y": [1.0] * 4}, "batch['y'] is not a tensor whose dim 0 is the rows."),
    (numbered(4) | {"y": torch.tensor(1.0)}, "batch['y'] is not a tensor whose dim 0 is the rows."),
    (numbered(4) | {"y": torch.ones(3)}, "the fields of a batch have one number of rows; these have {'x': 4, 'y': 3}."),
    ({}, "the fields of a batch have one number of rows; these have {}."),
    (numbered(4) | {"z": torch.ones(4)}, "the model takes the fields ['x', 'y'], but the batch has ['x', 'y', 'z']."),
    ({"x": torch.ones(4, 3)}, "the model takes the fields ['x', 'y'], but the batch has ['x']."),
    (
        numbered(4) | {"x": torch.ones(4, 3, dtype=torch.int64)},
        "batch['x'] is torch.int64[2, 3], but the model takes torch.float64[None, 3] (None is any size).",
    ),
    (
        numbered(4) | {"x": torch.ones(4, 5, dtype=torch.float64)},
        "batch['x'] is torch.float64[2, 5], but the model takes torch.float64[None, 3] (None is any size).",
    ),
    (
        numbered(4) | {"y": torch.ones(4, 1, dtype=torch.float64)},
        "batch['y'] is torch.float64[2, 1], but the model takes torch.float64[None] (None is any size).",
    ),
    (Rows(4.0), "batch.size is 4.0: it is the number of rows, an integer."),
    (Rows(4, wrong=-1), "batch.rows(0, 2) returned 1 rows, but 2 were asked for."),
    (Rows(4, wrong=1), "batch.rows(0, 2) returned 3 rows, but 2 were asked for."),
]


@pytest.mark.parametrize(("batch", "message"), REFUSED, ids=[message[:60] for _, message in REFUSED])
def test_a_batch_that_the_model_cannot_take_is_refused(batch, message):
    with pytest.raises(DataError, match=re.escape(message)):
        share(Mesh(dp=2), batch)


@pytest.mark.parametrize("rows", [0, 1, 6, 11, 13])
def test_rows_that_do_not_divide_are_refused_with_every_factor(rows):
    message = (
        f"a batch of {rows} rows does not divide into ep=1 * dp=2 replicas times 6 microbatches ({rows} / 12). "
        "Use a multiple of 12 rows."
    )
    for batch in (numbered(rows), Rows(rows)):
        with pytest.raises(DataError, match=re.escape(message)):
            share(Mesh(dp=2), batch, microbatches=6)


def test_without_data_axes_there_is_one_replica_in_the_message():
    plan = fp.compose(fp.stage_pp(microbatches=2))(regression()).plan(Mesh())
    with pytest.raises(DataError, match="a batch of 3 rows does not divide into 1 replica times 2 microbatches"):
        share_of(plan, SimpleNamespace(rank=0, device=torch.device("cpu")), numbered(3))


def test_free_sizes_may_change_from_batch_to_batch():
    model = Model(
        {"w": Param((3,), "in")},
        [("x", "w", lambda p, batch, par: batch["x"] @ p)],
        lambda p, x, par: (x.sum(), len(x)),
        {"x": Input((None, None, 3), torch.float64)},
    )
    for seq in (1, 5):
        assert share(Mesh(), {"x": torch.ones(2, seq, 3, dtype=torch.float64)}, model=model).shapes()["x"][0] == (
            2,
            seq,
            3,
        )


def test_floating_point_fields_become_the_dtype_of_the_parameters_and_integers_stay():
    model = Model(
        {"w": Param((3,), "in")},
        [("x", "w", lambda p, batch, par: batch["x"] @ p + batch["n"])],
        lambda p, x, par: (x.sum(), len(x)),
        {"x": Input((None, 3), torch.float32), "n": Input((None,), torch.int64)},
    )
    for given in (torch.float32, torch.float64):
        for dtype in (torch.float64, torch.bfloat16):
            batch = {"x": torch.ones(2, 3, dtype=given), "n": torch.ones(2, dtype=torch.int64)}
            fields = share(Mesh(), batch, dtype=dtype, model=model).fields
            assert (fields["x"].dtype, fields["n"].dtype) == (dtype, torch.int64)
            assert batch["x"].dtype == given
