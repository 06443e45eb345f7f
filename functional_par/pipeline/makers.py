"""Schedules by name: small functions of the number of ranks, microbatches and chunks (stages a rank). All take any number of
microbatches, and keep them in order on every stage, so all give the same bits.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest

from functional_par.pipeline.costs import Costs
from functional_par.pipeline.greedy import greedy
from functional_par.pipeline.schedule import Action, Row, Schedule
from functional_par.pipeline.simulate import simulate

Step = tuple[str, int]
"""A kind and a stage. Microbatches follow by counting; a ``W`` is that of the oldest ``I`` that has none yet."""


def afab(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, both in order (GPipe, arXiv 1811.06965). Bubble ``(p - 1) / (m + p - 1)``, and all
    activations are alive.

    >>> print(afab(2, 3))
    0F0 0F1 0F2 0B0 0B1 0B2
    1F0 1F1 1F2 1B0 1B1 1B2
    """
    return Schedule("afab", looped_bfs(ranks, microbatches, 1).rows)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """One forward, one backward (PipeDream-Flush, arXiv 2006.09503), after ``min(m, p - rank - 1)`` forwards. Bubble
    ``(p - 1) / (m + p - 1)``, and at most ``p - rank`` activations are alive.

    >>> print(one_f_one_b(2, 3))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    """
    return Schedule("1f1b", interleaved(ranks, microbatches, 1).rows)


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B over chunks (Megatron, arXiv 2104.04473): stage s is on rank ``s % p``, and microbatches go in groups of p, each
    through one chunk after the other. Bubble ``(p - 1) / (v m + p - 1)`` if p divides m.

    Megatron wants m to be a multiple of p. Here the schedule of the next multiple is made and cut.

    >>> print(interleaved(2, 2, 2))
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    groups = -(-microbatches // ranks)
    rows = []
    for rank in range(ranks):
        away = ranks - rank - 1
        warm_up = away if chunks == 1 else 2 * away + (chunks - 1) * ranks
        rows.append(_alternating(*_in_groups(ranks, rank, groups, chunks), warm_up))
    return _cut("interleaved", rows, microbatches)


def looped_bfs(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """All microbatches through one chunk after the other, then back (arXiv 2211.05953): stage s is on rank ``s % p``. All
    activations are alive. Bubble ``(p - 1) / (v m + p - 1)`` if m is at least p.

    >>> print(looped_bfs(1, 2, 2))
    0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1
    """
    rows = []
    for rank in range(ranks):
        forwards = [stage for stage in range(rank, ranks * chunks, ranks) for _ in range(microbatches)]
        rows.append(_alternating(forwards, forwards[::-1], len(forwards)))
    return _cut("looped-bfs", rows, microbatches)


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with the backward in two, the second part in the bubbles (ZB-H1 of arXiv 2401.10241). At most p activations are
    alive. If m is at least p, and W takes no longer than F and I, each rank is idle for ``(p - 1) (F + I - W)``, a third of
    1F1B's if all three are equal: ``3 m + p - 1`` in all for unit costs.

    >>> print(zb_h1(2, 3))
    0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    return Schedule("zb-h1", interleaved_zb(ranks, microbatches, 1).rows)


def zb_1p(ranks: int, microbatches: int, costs: Costs | None = None) -> Schedule:
    """A zero-bubble schedule for the given costs of the stages, with 1F1B's memory: at most p activations are alive (ZB-1p of
    arXiv 2401.10241, by list scheduling). With unit costs it is ``zb_h1``. One rank has no bubble and keeps backwards whole.

    >>> zb_1p(2, 3).rows == zb_h1(2, 3).rows
    True
    """
    return _zero_bubble("zb-1p", ranks, microbatches, costs, ranks)


def zb_2p(ranks: int, microbatches: int, costs: Costs | None = None) -> Schedule:
    """The same with up to ``2 p - 1`` activations alive where that makes it faster, as it does where stages take different
    times (ZB-2p of arXiv 2401.10241): of the schedules with p, 3/2 p and 2 p - 1 the first that is within a hundredth of the
    fastest. With unit costs it is ``zb_h1``, which nothing beats.

    >>> zb_2p(2, 3).rows == zb_h1(2, 3).rows
    True
    """
    found = []
    for live in sorted({ranks, ranks + ranks // 2, 2 * ranks - 1}):
        made = _zero_bubble("zb-2p", ranks, microbatches, costs, live)
        found.append((simulate(made, costs or Costs(1, 1, 1)).makespan, made))
    best = min(time for time, _ in found)
    return next(made for time, made in found if time <= best * 1.01)


def _zero_bubble(name: str, ranks: int, microbatches: int, costs: Costs | None, live: int) -> Schedule:
    if ranks == 1:  # there is no bubble to fill
        return Schedule(name, one_f_one_b(ranks, microbatches).rows)
    return greedy(range(ranks), microbatches, costs, live=live, name=name)


def interleaved_zb(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """``interleaved`` with the backward in two (ZB1P over chunks). At most ``v p`` activations are alive. With unit costs it
    takes ``3 v m + p - 1`` if p divides m: as many forwards first as 1F1B has, and on each rank as many weight-backwards put
    off as there are ranks before it. Other numbers of microbatches are scheduled greedily, and take a few units more.
    """
    if chunks > 1 and microbatches % ranks:
        return greedy([*range(ranks)] * chunks, microbatches, live=chunks * ranks, name="interleaved-zb")
    groups = -(-microbatches // ranks)
    return _cut("interleaved-zb", [_halved(ranks, groups, chunks, rank) for rank in range(ranks)], microbatches)


def zbv(ranks: int, microbatches: int) -> Schedule:
    """Two chunks a rank in the shape of a V, so that the loss is on the first rank, and the backward in two (ZB-V of arXiv
    2401.10241, arXiv 2405.15362). At most 2 p activations are alive, of stages half as deep as those of 1F1B. With unit costs
    it takes ``6 m + p - 1`` if m is at least p: what is left is one fill of the pipeline, ``p - 1`` of idle time on each rank.
    """
    return greedy(_v_shape(ranks), microbatches, live=2 * ranks, name="zbv")


def dual_pipe_v(ranks: int, microbatches: int) -> Schedule:
    """DeepSeek's DualPipe (arXiv 2412.19437) cut in half: the V shape of ``zbv``, forwards of one chunk paired with backwards
    of the other, and the backward in two only where that fills a bubble. At most ``2 p + 1`` activations are alive.
    With unit costs it takes ``6 m + p - 1`` if m is at least 2 p.

    Fewer microbatches than ``2 p`` are those of a schedule that was made for as many.
    """
    made = max(microbatches, 2 * ranks)
    return _cut("dualpipev", [_numbered(_dual(ranks, rank, made)) for rank in range(ranks)], microbatches)


def _v_shape(ranks: int) -> tuple[int, ...]:
    """Down the ranks and up again."""
    return (*range(ranks), *reversed(range(ranks)))


def _dual(ranks: int, rank: int, microbatches: int) -> Iterator[Step]:
    """Steps of one rank: ``a`` is its stage on the way down, ``b`` that on the way up."""
    a, b, away, behind = rank, 2 * ranks - 1 - rank, ranks - 1 - rank, rank + 1
    yield from [("F", a)] * (2 * away)
    yield from [("F", a), ("F", b)] * behind
    yield from [("I", b), ("W", b), ("F", b)] * away
    yield from [("F", a), ("B", b), ("F", b), ("B", a)] * (microbatches - 2 * ranks + behind)
    yield from [("B", b), ("F", b), ("B", a)] * away
    last = [b, a] * behind
    yield from (("B", stage) for stage in last[:behind])
    yield from (("I", stage) for stage in last[behind:])
    yield from [("W", a), ("I", a)] * away
    yield from [("W", a)] * behind


def _in_groups(ranks: int, rank: int, groups: int, chunks: int) -> tuple[list[int], list[int]]:
    """The stages of a rank's forwards and of its backwards: as many microbatches as ranks through one after the other."""
    stages = range(rank, ranks * chunks, ranks)
    forwards = [stage for stage in stages for _ in range(ranks)]
    return forwards * groups, forwards[::-1] * groups


def _halved(ranks: int, groups: int, chunks: int, rank: int) -> Row:
    """A forward and an input-backward in turn, after some forwards; weight-backwards follow ``rank`` input-backwards later."""
    forwards, backwards = _in_groups(ranks, rank, groups, chunks)
    warm_up = chunks * ranks - rank - 1
    steps = [("F", stage) for stage in forwards[:warm_up]]
    for at, stage in enumerate(backwards):
        steps += [("F", later) for later in forwards[warm_up + at : warm_up + at + 1]]
        steps += [("I", stage), *[("W", stage)] * (at >= rank)]
    return _numbered([*steps, *[("W", rank)] * rank])


def _alternating(forwards: Sequence[int], backwards: Sequence[int], warm_up: int) -> Row:
    """Some forwards, then a forward and a backward in turn, then the other backwards."""
    pairs = zip_longest([("F", stage) for stage in forwards[warm_up:]], [("B", stage) for stage in backwards])
    return _numbered([*(("F", s) for s in forwards[:warm_up]), *(step for step in chain(*pairs) if step is not None)])


def _numbered(steps: Iterable[Step]) -> Row:
    """Give the steps of each stage their microbatches, in order."""
    seen: Counter[tuple[int, bool]] = Counter()
    owed: deque[Action] = deque()
    row = []
    for kind, stage in steps:
        # Literals that are repeated by ``*`` are plain strings to the type checker.
        action = owed.popleft() if kind == "W" else Action(stage, kind, seen[stage, kind == "F"])  # type: ignore[arg-type]
        seen[stage, kind == "F"] += kind != "W"
        if kind == "I":
            owed.append(action._replace(kind="W"))
        row.append(action)
    return tuple(row)


def _cut(name: str, rows: Iterable[Row], microbatches: int) -> Schedule:
    """Only the first microbatches. What is left of a schedule that runs, runs: nothing waits for what is gone."""
    return Schedule(name, tuple(tuple(action for action in row if action.microbatch < microbatches) for row in rows))
