"""Plays the messages of a schedule without running it: who can go on, in which order, and who waits for whom forever."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from functional_par.errors import ScheduleError
from functional_par.pipeline.messages import Message, Task

Lane = tuple[int, int]
"""Source and target of messages: two different ranks."""


def play(name: str, rows: Sequence[Sequence[Task]]) -> Iterator[tuple[int, Task]]:
    """All tasks with their ranks, in an order in which each has what it takes.

    A rank posts the receives of its next task, waits until all that the task takes is there, and sends without waiting. A
    message passes when it is the next of its lane at both ends, was sent, and its receive was posted. What can run does not
    depend on the order of play, so one game is a proof.

    Raises:
        ScheduleError: the ends of a lane disagree about the order of its messages, or ranks wait for each other.
    """
    game = _Game(rows, _lanes(name, rows))
    yield from game.run()
    if game.stuck:
        raise ScheduleError(f"schedule {name} never ends: {'; '.join(game.ring())}.")


def _lanes(name: str, rows: Sequence[Sequence[Task]]) -> dict[Lane, list[Message]]:
    sends: dict[Lane, list[Message]] = {}
    posts: dict[Lane, list[Message]] = {}
    for row in rows:
        for task in row:
            for message in task.sends:
                if not message.local:
                    sends.setdefault((message.source, message.target), []).append(message)
            for message in task.posts:
                posts.setdefault((message.source, message.target), []).append(message)
    for lane in sorted(sends.keys() | posts.keys()):
        _check_lane(name, lane, sends.get(lane, []), posts.get(lane, []))
    return sends


def _check_lane(name: str, lane: Lane, sends: Sequence[Message], posts: Sequence[Message]) -> None:
    for at in range(max(len(sends), len(posts))):
        sent, posted = (str(ends[at]) if at < len(ends) else "nothing" for ends in (sends, posts))
        if sent != posted:
            raise ScheduleError(
                f"schedule {name}: message {at} from rank {lane[0]} to rank {lane[1]}: one sends {sent}, the other receives "
                f"{posted}. Both ends of a lane have the same messages in the same order."
            )


@dataclass
class _Traffic:
    """Of one lane: its messages, and how many were sent and have receives."""

    messages: Sequence[Message]
    sent: int = 0
    posted: int = 0
    passed: int = 0


class _Game:
    def __init__(self, rows: Sequence[Sequence[Task]], lanes: dict[Lane, list[Message]]) -> None:
        self.rows = rows
        self.at = [0] * len(rows)
        self.there: set[Message] = set()
        self.lanes = {lane: _Traffic(messages) for lane, messages in lanes.items()}

    def run(self) -> Iterator[tuple[int, Task]]:
        for rank in range(len(self.rows)):
            self._post(rank)
        able = deque(range(len(self.rows)))
        while able:
            rank = able.popleft()
            while self.at[rank] < len(self.rows[rank]) and self._missing(rank) is None:
                task = self.rows[rank][self.at[rank]]
                yield rank, task
                self.at[rank] += 1
                able += self._send(task)
                self._post(rank)

    def _missing(self, rank: int) -> Message | None:
        takes = self.rows[rank][self.at[rank]].takes
        return next((message for message in takes if message not in self.there), None)

    def _post(self, rank: int) -> None:
        """The receives of a rank's next task."""
        if self.at[rank] < len(self.rows[rank]):
            for message in self.rows[rank][self.at[rank]].posts:
                traffic = self.lanes[message.source, message.target]
                traffic.posted += 1
                self._pass(traffic)

    def _send(self, task: Task) -> list[int]:
        """Returns the ranks that may go on."""
        for message in task.sends:
            if message.local:
                self.there.add(message)
                continue
            traffic = self.lanes[message.source, message.target]
            traffic.sent += 1
            self._pass(traffic)
        return [message.target for message in task.sends if not message.local]

    def _pass(self, traffic: _Traffic) -> None:
        while traffic.passed < min(traffic.sent, traffic.posted):
            self.there.add(traffic.messages[traffic.passed])
            traffic.passed += 1

    @property
    def stuck(self) -> dict[int, Message]:
        """The ranks that are not done, and the first message that each waits for."""
        unfinished = (rank for rank, row in enumerate(self.rows) if self.at[rank] < len(row))
        return {rank: message for rank in unfinished if (message := self._missing(rank)) is not None}

    def ring(self) -> list[str]:
        """Who waits for whom, in a ring; for people."""
        stuck = self.stuck
        path = [min(stuck)]
        while path[-1] not in path[:-1] and stuck[path[-1]].source in stuck:
            path.append(stuck[path[-1]].source)
        ring = path[path.index(path[-1]) : -1] if path[-1] in path[:-1] else path
        return [self._words(rank, stuck[rank]) for rank in ring]

    def _words(self, rank: int, wanted: Message) -> str:
        rest = self.rows[wanted.source][self.at[wanted.source] :]
        sender = next((task for task in rest if wanted in task.sends), None)
        source = "it" if wanted.local else f"rank {wanted.source}"
        what = f"{'activations' if wanted.forward else 'gradients'} of microbatch {wanted.microbatch}"
        return (
            f"rank {rank} at {self.rows[rank][self.at[rank]].action} waits for {what} from stage {wanted.producer}, which "
            f"{f'{source} sends after {sender.action}' if sender else 'nobody sends'}"
        )
