"""What ranks send each other, derived from a schedule: for each action what it takes, what it sends, and which receives are
posted before it. Both ends of a lane read its order off the same schedule, so nothing but tensors is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from functional_par.pipeline.schedule import Action, Edges, Schedule

AHEAD = 1
"""Receives are posted this many actions before the one that takes them: they travel while the rank computes."""


class Message(NamedTuple):
    """The activations (or cotangents) of one microbatch on their way from one stage to another.

    Attributes:
        producer, consumer: the stages; the consumer is the later one for activations, the earlier one for cotangents.
        microbatch: whose.
        source, target: their ranks. Equal ranks hand over without a message.
    """

    producer: int
    consumer: int
    microbatch: int
    source: int
    target: int

    @property
    def forward(self) -> bool:
        """Whether it carries activations."""
        return self.producer < self.consumer

    @property
    def local(self) -> bool:
        return self.source == self.target

    def __str__(self) -> str:
        what = "activations" if self.forward else "gradients"
        return f"{what} of microbatch {self.microbatch} from stage {self.producer} to stage {self.consumer}"


@dataclass(frozen=True)
class Task:
    """One action with its communication.

    Attributes:
        action: what to compute.
        posts: receives to post before it, each lane in the order of its sends.
        takes: messages that have to be there before it starts, local ones included.
        sends: messages that go out after it, local ones included.
    """

    action: Action
    posts: tuple[Message, ...]
    takes: tuple[Message, ...]
    sends: tuple[Message, ...]


def tasks(schedule: Schedule, edges: Edges, ahead: int = AHEAD) -> tuple[tuple[Task, ...], ...]:
    """The tasks of every rank.

    Args:
        schedule: every action at most once, every stage on one rank.
        edges: which stages feed which.
        ahead: how many actions early a receive is posted.

    >>> [first, last] = tasks(Schedule.of("one", [["0F0", "0B0"], ["1F0", "1B0"]]), ((0, 1),))
    >>> [str(message) for message in first[0].sends]
    ['activations of microbatch 0 from stage 0 to stage 1']
    >>> first[1].takes == last[1].sends == first[0].posts
    True
    """
    routes = _Routes(schedule, edges)
    lanes: dict[tuple[int, int], list[Message]] = {}
    for row in schedule.rows:
        for action in row:
            for message in routes.sends(action):
                if not message.local:
                    lanes.setdefault((message.source, message.target), []).append(message)
    return tuple(_row(schedule, rank, routes, lanes, ahead) for rank in range(schedule.ranks))


def _row(
    schedule: Schedule, rank: int, routes: _Routes, lanes: dict[tuple[int, int], list[Message]], ahead: int
) -> tuple[Task, ...]:
    row = schedule.rows[rank]
    taken = [tuple(routes.takes(action)) for action in row]
    arriving = {lane: messages for lane, messages in lanes.items() if lane[1] == rank}
    places = {message: i for messages in arriving.values() for i, message in enumerate(messages)}
    posted = dict.fromkeys(arriving, 0)
    made = []
    for at, action in enumerate(row):
        posts: list[Message] = []
        for message in (m for takes in taken[at : at + 1 + ahead] for m in takes if m in places):
            lane = message.source, message.target
            posts += arriving[lane][posted[lane] : places[message] + 1]
            posted[lane] = max(posted[lane], places[message] + 1)
        made.append(Task(action, tuple(posts), taken[at], tuple(routes.sends(action))))
    return tuple(made)


class _Routes:
    """Which messages an action takes and sends."""

    def __init__(self, schedule: Schedule, edges: Edges) -> None:
        self._homes = schedule.placement
        self._producers: dict[int, list[int]] = {}
        self._consumers: dict[int, list[int]] = {}
        for producer, consumer in sorted(edges):
            self._producers.setdefault(consumer, []).append(producer)
            self._consumers.setdefault(producer, []).append(consumer)

    def sends(self, action: Action) -> Iterator[Message]:
        to = {"F": self._consumers, "W": {}}.get(action.kind, self._producers)
        return (self._message(action.stage, stage, action) for stage in to.get(action.stage, ()))

    def takes(self, action: Action) -> Iterator[Message]:
        source = {"F": self._producers, "W": {}}.get(action.kind, self._consumers)
        return (self._message(stage, action.stage, action) for stage in source.get(action.stage, ()))

    def _message(self, producer: int, consumer: int, action: Action) -> Message:
        return Message(producer, consumer, action.microbatch, self._homes[producer], self._homes[consumer])
