"""What a schedule does when it is run, without any code of the package: ranks in turn, one queue for each pair of ranks."""

from __future__ import annotations

from collections import Counter, defaultdict, deque


def runs_right(rows, stages, microbatches, edges):
    """Whether the rows, of (stage, kind, microbatch), end and compute every gradient exactly once from what it needs.

    A stage has its weights on one rank. A forward takes what its producers sent, and keeps it; a backward takes what is kept
    and what its consumers sent. A rank stops when something has not come, and tries again.
    """
    home = {}
    for rank, row in enumerate(rows):
        for stage, _, _ in row:
            if home.setdefault(stage, rank) != rank:
                return False
    if set(home) != set(range(stages)):
        return False
    world = _World(home, edges)
    at, moved = [0] * len(rows), True
    try:
        while moved:
            moved = False
            for rank, row in enumerate(rows):
                while at[rank] < len(row) and world.step(rank, *row[at[rank]]):
                    at[rank] += 1
                    moved = True
    except KeyError:  # an action whose rank does not have what it kept for it
        return False
    once = Counter({(stage, i): 1 for stage in range(stages) for i in range(microbatches)})
    ended = all(here == len(row) for here, row in zip(at, rows, strict=True))
    return ended and world.is_empty and world.inputs == world.weights == once


class _World:
    def __init__(self, home, edges):
        self.home, self.edges = home, edges
        self.lanes = defaultdict(deque)  # (source, target): messages (sender's stage, receiver's stage, microbatch)
        self.inbox = defaultdict(Counter)
        self.kept, self.owed = Counter(), Counter()
        self.inputs, self.weights = Counter(), Counter()

    def step(self, rank, stage, kind, microbatch):
        """Run one action; False if a message that it takes is not there."""
        before = [a for a, b in self.edges if b == stage]
        after = [b for a, b in self.edges if a == stage]
        sources, targets = {"F": (before, after), "W": ((), ())}.get(kind, (after, before))
        if not self._take(rank, [(other, stage, microbatch) for other in sources]):
            return False
        here = stage, microbatch
        if kind == "F":
            self.kept[here] += 1
        else:
            _drop(self.owed if kind == "W" else self.kept, here)
        self.owed[here] += kind == "I"
        self.inputs[here] += kind in "BI"
        self.weights[here] += kind in "BW"
        for other in targets:
            self.lanes[rank, self.home[other]].append((stage, other, microbatch))
        return True

    def _take(self, rank, wanted):
        inbox = self.inbox[rank]
        for (_, target), lane in list(self.lanes.items()):
            while target == rank and lane:
                inbox[lane.popleft()] += 1
        if any(inbox[message] < 1 for message in wanted):
            return False
        for message in wanted:
            _drop(inbox, message)
        return True

    @property
    def is_empty(self):
        """Nothing is left that somebody kept or sent."""
        left = [self.kept, self.owed, *self.inbox.values(), *map(Counter, self.lanes.values())]
        return not any(+counter for counter in left)


def _drop(counter, key):
    if counter[key] < 1:
        raise KeyError(key)
    counter[key] -= 1
