"""What a rank notes of a real run of a schedule, and how all ranks put theirs together on one clock."""

from __future__ import annotations

import time

import torch

from functional_par.comm.base import AllGather, AllReduce, World
from functional_par.mesh import AXES
from functional_par.pipeline.schedule import KINDS, Action
from functional_par.pipeline.timeline import Span, Timeline

ROUNDS = 8
"""Exchanges by which the ranks compare their clocks."""


class Recording:
    """Give one to ``step(state, batch, recording)``, then call ``timeline`` on every rank.

    Attributes:
        peak: the largest number of live activations: (stage, microbatch) pairs that have gone forward and not wholly back.
        spans: action, start and end in seconds of this rank's clock; empty unless times are asked for.
    """

    def __init__(self, times: bool = False) -> None:
        self.times, self.peak = times, 0
        self.spans: list[tuple[Action, float, float]] = []
        self._began = 0.0

    def count(self, live: int) -> None:
        """Note how many activations are live."""
        self.peak = max(self.peak, live)

    def begin(self, action: Action, device: torch.device) -> None:
        """Note that an action begins: all that it takes is there."""
        if self.times:
            self._began = _now(device)

    def end(self, action: Action, device: torch.device) -> None:
        """Note that it has ended, and has handed on what it sends."""
        if self.times:
            self.spans.append((action, self._began, _now(device)))

    def timeline(self, world: World) -> Timeline:
        """The spans of all ranks of the world on one clock, that of rank 0 at its first span. Collective."""
        offset = _offset(world)
        group = world.group(*AXES)
        count = torch.tensor([len(self.spans)], dtype=torch.int64, device=world.device)
        most = int(group.start(AllReduce("max"), count).wait()) if group.size > 1 else len(self.spans)
        kinds = list(KINDS)
        table = torch.full((1, most, 5), -1.0, dtype=torch.float64)
        for i, (action, start, end) in enumerate(self.spans):
            table[0, i] = torch.tensor(
                [action.stage, kinds.index(action.kind), action.microbatch, start + offset, end + offset],
                dtype=torch.float64,
            )
        table = table.to(world.device)
        rows = (group.start(AllGather(0), table).wait() if group.size > 1 else table).tolist()
        found = [
            Span(rank, Action(int(stage), kinds[int(kind)], int(microbatch)), start, end)
            for rank, row in enumerate(rows)
            for stage, kind, microbatch, start, end in row
            if stage >= 0
        ]
        first = min((span.start for span in found), default=0.0)
        spans = tuple(Span(s.rank, s.action, s.start - first, s.end - first) for s in found)
        return Timeline(world.mesh.size, spans, "s")


def _now(device: torch.device) -> float:
    """Seconds on this rank's clock, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _offset(world: World) -> float:
    """What to add to this rank's clock to get that of rank 0.

    In an exchange among all ranks nobody is done before everybody has begun. So the time at which rank 0 began, by its
    clock, is before the time at which this rank was done, by its own, and the other way round: each exchange bounds the
    offset from both sides, and it is at the middle. Clocks that may be one clock, by these bounds, are taken to be one.
    """
    group = world.group(*AXES)
    if group.size == 1:
        return 0.0
    low, high = float("-inf"), float("inf")
    began = done = 0.0
    for _ in range(ROUNDS):
        # What travels are the times of the exchange before.
        times = torch.tensor([[began, done]], dtype=torch.float64, device=world.device)
        began_now = time.perf_counter()
        theirs = group.start(AllGather(0), times).wait()[0].tolist()
        done_now = time.perf_counter()
        if done:
            low, high = max(low, theirs[0] - done), min(high, theirs[1] - began)
        began, done = began_now, done_now
    return 0.0 if low <= 0.0 <= high else (low + high) / 2
