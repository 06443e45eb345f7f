"""What the ranks say when a connection fails or is missing; with stand-ins for what needs GPUs or a dead peer."""

import re
from types import SimpleNamespace

import pytest
import torch

from functional_par.comm.base import AllReduce, Record
from functional_par.comm.checks import Awaited
from functional_par.comm.process import ProcessWorld, _Call, _Running
from functional_par.comm.wire import mark_end
from functional_par.errors import CommError
from functional_par.launch import _state
from tests.raises import matched


class Broken:
    """A work of torch.distributed whose peer is gone."""

    def wait(self):
        raise RuntimeError("Connection closed by peer")


def test_a_collective_that_does_not_complete_names_the_rank_the_call_and_the_cause():
    world = SimpleNamespace(rank=3, waits=None, record=Record(doing="backward of microbatch 1 on stage 0"))
    call = _Call(Awaited(AllReduce(), "dp+tp", (2, 5), torch.float32), "2,3", 0, (2, 3))
    running = _Running(world, [Broken()], lambda: torch.zeros(2, 5), call)
    message = (
        "rank 3: all_reduce over dp+tp of float32[2, 5] with ranks 2, 3 did not complete, during backward of microbatch 1 on "
        "stage 0: Connection closed by peer"
    )
    with pytest.raises(CommError, match=re.escape(message)):
        running.wait()
    assert world.waits is call


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.bool, torch.float32, torch.int64], ids=str
)
def test_a_message_that_happens_to_end_in_the_pattern_is_not_taken_for_a_short_one(dtype):
    x = torch.zeros(64, dtype=dtype)
    unwritten = mark_end(x)
    x.fill_(True if dtype == torch.bool else -91 if dtype == torch.int8 else 0xA5 if dtype == torch.uint8 else -23131)
    assert not unwritten()


def test_a_rank_that_fails_before_it_has_joined_the_others_says_so():
    matched(_state(3, []), "rank 3 was starting")


def test_a_message_on_nccl_between_stages_that_are_no_neighbours_names_the_fix():
    world = SimpleNamespace(backend="nccl", _lanes={})
    message = r"rank 5 has no connection to rank 2: .* call world\.prepare\(\[\(2, 5\)\]\) on every rank first"
    with pytest.raises(CommError, match=message):
        ProcessWorld._lane(world, 5, 2)
