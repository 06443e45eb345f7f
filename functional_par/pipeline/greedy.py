"""Zero-bubble schedules by list scheduling: the pipeline is played on a clock, and each rank that is free takes the most
urgent action that is ready and that its memory allows. What the ranks chose is the schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from functional_par.errors import ScheduleError
from functional_par.pipeline.costs import Costs
from functional_par.pipeline.schedule import Action, Kind, Schedule


def greedy(
    placement: Sequence[int],
    microbatches: int,
    costs: Costs | None = None,
    live: int | None = None,
    pending: int | None = None,
    name: str = "greedy",
) -> Schedule:
    """A schedule of a chain of stages, with input and weight gradients apart, that is good for the given costs.

    A free rank alternates between forwards and input-backwards, as in 1F1B; if the one whose turn it is is not ready it takes
    the other, and if neither is, the oldest weight-backward, on which nobody waits. A forward that is ready and has no room
    makes room first, by a weight-backward. Of several stages the latest goes first. Microbatches stay in order for every
    stage and kind, so gradients have the same bits as under any other schedule made here.

    Args:
        placement: the rank of each stage.
        microbatches: at least 1.
        costs: times, ones if left out.
        live: most activations that a rank keeps, counted in pairs of stage and microbatch, from the start of a forward to the
            end of its weight-backward; at least as many as the rank has stages. No bound if left out.
        pending: most weight-backwards that a rank puts off. No bound if left out.
        name: of the schedule.

    >>> print(greedy((0, 1), 3, live=2))
    0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    placed = isinstance(placement, Sequence) and all(type(rank) is int and rank >= 0 for rank in placement)
    if not placed or not placement or type(microbatches) is not int or microbatches < 1:
        raise ScheduleError(
            f"greedy(placement={placement!r}, microbatches={microbatches!r}): the rank of each stage, integers from 0, and at "
            "least one microbatch."
        )
    ranks = [_Rank(rank, name, live, pending) for rank in range(max(placement) + 1)]
    for stage, rank in enumerate(placement):
        ranks[rank].stages.append(stage)
    for state in ranks:
        state.check()
    _Clock(tuple(placement), microbatches, (costs or Costs(1, 1, 1, 0)).check(len(placement)), ranks).play()
    return Schedule(name, tuple(tuple(rank.row) for rank in ranks))


@dataclass
class _Rank:
    index: int
    name: str
    most_live: int | None
    most_pending: int | None
    stages: list[int] = field(default_factory=list)
    row: list[Action] = field(default_factory=list)
    free: Any = 0
    live: int = 0
    turn: Kind = "F"
    pending: deque[Action] = field(default_factory=deque)

    def check(self) -> None:
        if self.most_live is not None and self.most_live < len(self.stages):
            raise ScheduleError(
                f"schedule {self.name}: rank {self.index} may keep {self.most_live} activations but has {len(self.stages)} "
                f"stages, and one microbatch needs one for each. Raise live to {len(self.stages)} or more."
            )
        if self.most_pending is not None and self.most_pending < 1:
            raise ScheduleError(
                f"schedule {self.name}: pending={self.most_pending}: a rank puts off at least 1 weight-backward."
            )

    def has_room(self, stage: int) -> bool:
        """Whether a forward of a stage may start. One place is kept for each later stage of this rank: so the oldest
        microbatch always finds room on its way to the end and back, and nobody waits forever."""
        return self.most_live is None or self.live + sum(later > stage for later in self.stages) < self.most_live

    @property
    def owes(self) -> bool:
        """Whether a weight-backward has to come before the next input-backward."""
        return self.most_pending is not None and len(self.pending) >= self.most_pending


class _Clock:
    """Plays the pipeline; ``arrived[kind][stage]`` are the times at which the inputs of its microbatches were there."""

    def __init__(self, placement: tuple[int, ...], microbatches: int, costs: Costs, ranks: list[_Rank]) -> None:
        self.placement, self.costs, self.ranks = placement, costs, ranks
        self.arrived: dict[Kind, list[list[Any]]] = {"F": [[] for _ in placement], "I": [[] for _ in placement]}
        self.done: dict[Kind, list[int]] = {"F": [0] * len(placement), "I": [0] * len(placement)}
        self.arrived["F"][0] = [0] * microbatches
        self.events: list[tuple[Any, int]] = [(0, rank.index) for rank in ranks]

    def play(self) -> None:
        while self.events:
            now, index = heappop(self.events)
            rank = self.ranks[index]
            if rank.free <= now and (action := self._choose(rank, now)) is not None:
                self._run(rank, action, now)

    def _choose(self, rank: _Rank, now: Any) -> Action | None:
        ready = self._ready(rank, "F", now)
        forward = next((action for action in ready if rank.has_room(action.stage)), None)
        back = None if rank.owes else next(iter(self._ready(rank, "I", now)), None)
        weight = rank.pending[0]._replace(kind="W") if rank.pending else None
        room = weight if ready else None
        order = (forward, room, back, weight) if rank.turn == "F" else (back, forward, weight)
        return next((action for action in order if action is not None), None)

    def _ready(self, rank: _Rank, kind: Kind, now: Any) -> list[Action]:
        """The next action of each stage of a rank that has its input, the latest stage first."""
        done, arrived = self.done[kind], self.arrived[kind]
        return [
            Action(stage, kind, done[stage])
            for stage in reversed(rank.stages)
            if done[stage] < len(arrived[stage]) and arrived[stage][done[stage]] <= now
        ]

    def _run(self, rank: _Rank, action: Action, now: Any) -> None:
        rank.row.append(action)
        rank.free = now + self.costs.of(action)
        heappush(self.events, (rank.free, rank.index))
        if action.kind == "W":
            rank.pending.popleft()
            rank.live -= 1
            return
        self.done[action.kind][action.stage] += 1
        if action.kind == "F":
            rank.live, rank.turn = rank.live + 1, "I"
        else:
            rank.pending.append(action)
            rank.turn = "F"
        self._hand_on(rank, action)

    def _hand_on(self, rank: _Rank, action: Action) -> None:
        """Send the output to the next stage; that of the last stage's forward, the loss, turns round."""
        turns = action.kind == "F" and action.stage == len(self.placement) - 1
        to = action.stage if turns else action.stage + (1 if action.kind == "F" else -1)
        if to < 0:
            return
        target = self.placement[to]
        there = rank.free + (0 if target == rank.index else self.costs.transfer)
        self.arrived["I" if turns else action.kind][to].append(there)
        heappush(self.events, (there, target))
