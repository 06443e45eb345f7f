"""A real run on a clock that is not real: every action takes the time that it is given, however long it took. So the times of
many ranks can be measured on few cores: what is real is the order of the actions, the messages, and who waits for whom.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from functional_par.comm.base import Group, Handle, World
from functional_par.pipeline.costs import Costs
from functional_par.pipeline.recording import Recording
from functional_par.pipeline.schedule import Action


class Stamps:
    """When messages were sent, by source, target and place. One for all threads of a run."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, int, int], Any] = {}
        self._lock = threading.Lock()

    def put(self, key: tuple[int, int, int], when: Any) -> None:
        with self._lock:
            self._times[key] = when

    def pop(self, key: tuple[int, int, int]) -> Any:
        with self._lock:
            return self._times.pop(key)


class VirtualRecording(Recording):
    """A recording whose clock is moved by the costs of actions, and by messages that arrive later."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(times=True)
        self.costs, self.clock = costs, 0

    def begin(self, action: Action, device: torch.device) -> None:
        # What is sent from here on leaves at the end of the action.
        self._began, self.clock = self.clock, self.clock + self.costs.of(action)

    def end(self, action: Action, device: torch.device) -> None:
        self.spans.append((action, self._began, self.clock))


class VirtualWorld(World):
    """A world of threads whose messages carry the time at which they were sent.

    Args:
        world: of this rank.
        recording: whose clock the messages move.
        stamps: shared by all ranks of the run.
    """

    def __init__(self, world: World, recording: VirtualRecording, stamps: Stamps) -> None:
        self.mesh, self.rank, self.device = world.mesh, world.rank, world.device
        self.backend, self.record = world.backend, world.record
        self._world, self._recording, self._stamps = world, recording, stamps
        self._places: Counter[tuple[int, int]] = Counter()

    def prepare(self, groups: Iterable[tuple[int, ...]]) -> None:
        self._world.prepare(groups)

    def subgroup(self, ranks: tuple[int, ...], label: str) -> Group:
        return self._world.subgroup(ranks, label)

    def send(self, x: Tensor, to: int, *, label: str = "pp") -> Handle:
        self._stamps.put(self._place(self.rank, to), self._recording.clock)
        return self._world.send(x, to, label=label)

    def recv(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        source: int,
        *,
        label: str = "pp",
        out: Tensor | None = None,
        what: object = "",
    ) -> Handle:
        handle = self._world.recv(shape, dtype, source, label=label, out=out, what=what)
        return _Arrival(handle, self._place(source, self.rank), self._recording, self._stamps)

    def _place(self, source: int, to: int) -> tuple[int, int, int]:
        place = self._places[source, to]
        self._places[source, to] = place + 1
        return source, to, place


class _Arrival:
    """A message that arrives when it was sent and has travelled."""

    def __init__(self, handle: Handle, key: tuple[int, int, int], recording: VirtualRecording, stamps: Stamps) -> None:
        self._handle, self._key, self._recording, self._stamps = handle, key, recording, stamps

    def wait(self) -> Tensor:
        x = self._handle.wait()
        arrived = self._stamps.pop(self._key) + self._recording.costs.transfer
        self._recording.clock = max(self._recording.clock, arrived)
        return x
