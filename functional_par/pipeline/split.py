"""Where the list of layers is cut into stages: the cut whose slowest rank is fastest, within the memory of a rank. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from functional_par.errors import CompositionError

Need = Callable[[int, int, int], int]
"""``(stage, start, end)`` to the bytes that a stage of the layers ``start`` to ``end`` (exclusive) needs."""

WIDTH, LEAST_WIDTH = 1500, 50
"""Beginnings of a split that are followed at once, where several stages lie on one rank: so many over the number of stages."""

SLACK = 100
"""A rank may be slower than need be by one part of so many where that makes the stages more even."""


def best_split(
    costs: Sequence[int], placement: Sequence[int], need: Need | None = None, room: int | None = None
) -> tuple[int, ...]:
    """Number of consecutive layers for each stage, at least one, such that the slowest rank is fastest; among equal splits
    the first stages get fewer layers.

    With one stage a rank this is exact, by dynamic programming over (stages, layers). With several, the slowest rank may take
    one part in ``SLACK`` more than it has to where that makes the slowest stage faster, since the pipeline fills by stages.
    This is exact too, by dynamic programming over (stages, layers, what each rank holds), up to a number of beginnings of a
    split at once (``WIDTH`` over the number of stages); where there are more, the most even ones are followed.

    Args:
        costs: work of each layer, in integers of any unit.
        placement: the rank of each stage.
        need, room: bytes of a stage, not falling with its layers, and how many bytes each rank has for its stages.

    Raises:
        CompositionError: fewer layers than stages, or no split whose ranks have room.

    >>> best_split([0, 4, 4, 4, 4, 3], (0, 1))
    (3, 3)
    >>> best_split([0, 4, 4, 4, 4, 3], (0, 1, 1, 0))
    (2, 1, 1, 2)
    """
    _check_stages(len(costs), placement)
    before = [0, *accumulate(costs)]
    problem = _Problem(
        len(costs),
        tuple(placement),
        lambda stage, start, end: before[end] - before[start],
        need if room is not None and need is not None else _nothing,
        lambda start: before[-1] - before[start],
    )
    return _best(problem, room) or _least(problem, room or 0)


def whole_numbers(costs: Sequence[float]) -> list[int]:
    """Costs in integers, of which sums are exact: themselves, or parts in a thousand million of the largest.

    >>> whole_numbers([3, 4]), whole_numbers([0.5, 0.25])
    ([3, 4], [1000000000, 500000000])
    """
    if all(isinstance(cost, int) for cost in costs):
        return [int(cost) for cost in costs]
    top = max(costs) or 1.0
    return [round(cost / top * 1_000_000_000) for cost in costs]


@dataclass(frozen=True)
class _Problem:
    """What is minimised: ``load`` of ranks and stages; ``rest`` is a lower bound of the load of all layers from one on."""

    layers: int
    placement: tuple[int, ...]
    load: Need
    need: Need
    rest: Callable[[int], int]


@dataclass(frozen=True)
class _Limits:
    """Of the load and the bytes of a rank; None is none."""

    load: int | None
    room: int | None

    def allow(self, load: int, need: int) -> bool:
        return (self.load is None or load <= self.load) and (self.room is None or need <= self.room)


_Held = tuple[tuple[int, int], ...]
"""Load and bytes so far of each rank that has a stage and gets another, in the order of the ranks."""

_Found = tuple[int, tuple[int, ...]]
"""The load of the slowest rank, or stage, so far, and the layers of each stage."""

_States = dict[tuple[int, _Held], _Found]


def _best(problem: _Problem, room: int | None, even: bool = True) -> tuple[int, ...] | None:
    """The rank first, then the stage; with one stage a rank these are the same."""
    stages = len(problem.placement)
    if len(set(problem.placement)) == stages:
        single = _rank_first(problem, room, None)
        return single and single[1]
    width = max(LEAST_WIDTH, WIDTH // stages)
    rough = _rank_first(problem, room, width // 10)
    exact = _search(problem, _Limits(rough and rough[0], room), by_stage=False, width=width) or rough
    if exact is None or not even:
        return exact and exact[1]
    near = exact[0] + exact[0] // SLACK
    return (_search(problem, _Limits(near, room), by_stage=True, width=width) or exact)[1]


def _rank_first(problem: _Problem, room: int | None, width: int | None) -> _Found | None:
    """The split with the fastest slowest rank. Without bounds of memory none of its stages need be slower than the mean and the
    slowest layer together, which leaves out most splits; with them it is tried."""
    stages = len(problem.placement)
    most = max(problem.placement.count(rank) for rank in set(problem.placement))
    slowest = max(problem.load(stages - 1, i, i + 1) for i in range(problem.layers))
    ceiling = most * (problem.rest(0) // stages + slowest + 1)
    found = _search(problem, _Limits(ceiling, room), by_stage=False, width=width)
    return found or _search(problem, _Limits(None, room), by_stage=False, width=width)


def _search(problem: _Problem, limits: _Limits, by_stage: bool, width: int | None) -> _Found | None:
    """The split with the lowest value: the load of the slowest stage, or of the slowest rank."""
    placement = problem.placement
    states: _States = {(0, ()): (0, ())}
    for stage, rank in enumerate(placement):
        before, after = _open(placement, stage), _open(placement, stage + 1)
        at = before.index(rank) if rank in before else None
        found: _States = {}
        for (start, held), (value, sizes) in states.items():
            mine = (0, 0) if at is None else held[at]
            for end, load, need in _ends(problem, limits, stage, start, mine):
                key = end, _with(held, before, after, rank, (load, need))
                slowest = max(value, problem.load(stage, start, end) if by_stage else load)
                known = found.get(key)
                if known is None or (slowest, (*sizes, end - start)) < known:
                    found[key] = slowest, (*sizes, end - start)
        states = _narrow(problem, limits, stage, found, width)
    return states.get((problem.layers, ()))


def _open(placement: Sequence[int], stage: int) -> list[int]:
    """The ranks that have a stage before this one and get another from it on."""
    return sorted(set(placement[:stage]) & set(placement[stage:]))


def _with(held: _Held, before: list[int], after: list[int], rank: int, mine: tuple[int, int]) -> _Held:
    """What the open ranks hold after a stage."""
    if not after:
        return ()
    if before == after and rank in after:
        at = after.index(rank)
        return (*held[:at], mine, *held[at + 1 :])
    known = dict(zip(before, held, strict=True)) | {rank: mine}
    return tuple(known[each] for each in after)


def _ends(
    problem: _Problem, limits: _Limits, stage: int, start: int, held: tuple[int, int]
) -> Iterator[tuple[int, int, int]]:
    """Where a stage may end, with the load and the bytes of its rank then."""
    left = len(problem.placement) - stage - 1
    for end in range(problem.layers if left == 0 else start + 1, problem.layers - left + 1):
        load, need = held[0] + problem.load(stage, start, end), held[1] + problem.need(stage, start, end)
        if not limits.allow(load, need):
            return
        yield end, load, need


def _narrow(problem: _Problem, limits: _Limits, stage: int, found: _States, width: int | None) -> _States:
    """Without the states that cannot end within the limit, and no more than ``width``, the most promising first."""
    later, stages = len(set(problem.placement[stage + 1 :])), len(problem.placement)
    if not later:
        return found

    def bound(key: tuple[int, _Held]) -> int:
        """Below this the ranks that have stages to come cannot end all."""
        return -(-(problem.rest(key[0]) + sum(load for load, _ in key[1])) // later)

    if limits.load is not None:
        found = {key: entry for key, entry in found.items() if bound(key) <= limits.load}
    if width is None or len(found) <= width:
        return found
    share = problem.rest(0) * (stages - stage - 1) // stages
    order = sorted(
        found, key=lambda key: (max(bound(key), found[key][0]), abs(problem.rest(key[0]) - share), found[key])
    )
    return {key: found[key] for key in order[:width]}


def _nothing(stage: int, start: int, end: int) -> int:
    return 0


def _check_stages(layers: int, placement: Sequence[int]) -> None:
    if len(placement) > layers:
        ranks = max(placement) + 1
        chunks, uneven = divmod(len(placement), ranks)
        asked = f"pp={ranks}" + ("" if uneven or chunks == 1 else f" * chunks={chunks} = {len(placement)}")
        raise CompositionError(
            f"{asked}: {len(placement)} pipeline stages, but the model has only {layers} layers. Use a pp (times chunks) of at "
            f"most {layers}."
        )


def _least(problem: _Problem, room: int) -> tuple[int, ...]:
    """The split that needs the least memory, if it fits; raises CompositionError with what it needs if it does not."""
    least = _Problem(problem.layers, problem.placement, problem.need, _nothing, lambda start: 0)
    sizes = _best(least, None, even=False) or ()
    if (needed := max(_rank_needs(problem, sizes))) <= room:
        return sizes  # of so many beginnings none that led here was followed
    raise CompositionError(
        f"no split of {problem.layers} layers on {len(problem.placement)} stages fits into {gigabytes(room)} a rank: the one "
        f"that needs the least is {list(sizes)}, with {gigabytes(needed)} on its fullest rank. Give a rank more room, raise pp "
        "or tp, make the rows of a microbatch fewer, or take a schedule that keeps fewer microbatches alive."
    )


def _rank_needs(problem: _Problem, sizes: Sequence[int]) -> list[int]:
    """Bytes of each rank."""
    needs, start = [0] * (max(problem.placement) + 1), 0
    for stage, size in enumerate(sizes):
        needs[problem.placement[stage]] += problem.need(stage, start, start + size)
        start += size
    return needs


def gigabytes(number: int) -> str:
    """Bytes for people who compare them with a bound.

    >>> gigabytes(1_500_000_000), gigabytes(20_480)
    ('1.500 GB', '0.00002048 GB')
    """
    return f"{number / 1e9:.3f} GB" if number >= 10**7 else f"{number / 1e9:.10f}".rstrip("0").rstrip(".") + " GB"
