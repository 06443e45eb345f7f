"""Where the list of layers is cut into stages: the cut whose slowest rank is fastest, within the memory of a rank. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NoReturn

from functional_par.errors import CompositionError

Need = Callable[[int, int, int], int]
"""``(stage, start, end)`` to the bytes that a stage of the layers ``start`` to ``end`` (exclusive) needs."""

WIDTH = 400
"""Beginnings of a split that are followed at once, where several stages lie on one rank."""

SLACK = 100
"""A rank may be slower than need be by one part of so many where that makes the stages more even."""


def best_split(
    costs: Sequence[int], placement: Sequence[int], need: Need | None = None, room: int | None = None
) -> tuple[int, ...]:
    """Number of consecutive layers for each stage, at least one, such that the slowest rank is fastest; among equal splits
    the first stages get fewer layers.

    With one stage a rank this is exact, by dynamic programming over (stages, layers). With several, the slowest rank may take
    one part in ``SLACK`` more than it has to where that makes the slowest stage faster, since the pipeline fills by stages.
    This is exact too, by dynamic programming over (stages, layers, what each rank holds), up to ``WIDTH`` beginnings of a
    split at once; where there are more, the most even ones are followed.

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
    found = _best(problem, room)
    if found is None:
        _refuse(problem, room or 0)
    return found


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
"""Load and bytes of each rank so far; zeros for one that has all its stages, whose load the value remembers."""

_Found = tuple[int, tuple[int, ...]]
"""The load of the slowest rank, or stage, so far, and the layers of each stage."""


def _best(problem: _Problem, room: int | None) -> tuple[int, ...] | None:
    """The rank first, then the stage; with one stage a rank these are the same."""
    if len(set(problem.placement)) == len(problem.placement):
        single = _search(problem, _Limits(None, room), by_stage=False, width=None)
        return single and single[1]
    rough = _search(problem, _Limits(None, room), by_stage=False, width=WIDTH // 10)
    exact = _search(problem, _Limits(rough and rough[0], room), by_stage=False, width=WIDTH) or rough
    if exact is None:
        return None
    near = exact[0] + exact[0] // SLACK
    even = _search(problem, _Limits(near, room), by_stage=True, width=WIDTH) or exact
    return even[1]


def _search(problem: _Problem, limits: _Limits, by_stage: bool, width: int | None) -> _Found | None:
    """The split with the lowest value: the load of the slowest stage, or of the slowest rank."""
    placement = problem.placement
    empty: _Held = ((0, 0),) * (max(placement) + 1)
    states: dict[tuple[int, _Held], _Found] = {(0, empty): (0, ())}
    for stage, rank in enumerate(placement):
        closes = rank not in placement[stage + 1 :]
        found: dict[tuple[int, _Held], _Found] = {}
        for (start, held), (value, sizes) in states.items():
            for end, load, need in _ends(problem, limits, stage, start, held[rank]):
                own = (0, 0) if closes else (load, need)
                key = end, (*held[:rank], own, *held[rank + 1 :])
                measure = problem.load(stage, start, end) if by_stage else load
                candidate = max(value, measure), (*sizes, end - start)
                if key not in found or candidate < found[key]:
                    found[key] = candidate
        states = _narrow(problem, limits, stage, found, width)
    return states.get((problem.layers, empty))


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


def _narrow(
    problem: _Problem, limits: _Limits, stage: int, found: dict[tuple[int, _Held], _Found], width: int | None
) -> dict[tuple[int, _Held], _Found]:
    """Without the states that cannot end within the limit, and no more than ``width``, the most promising first."""
    later = sorted(set(problem.placement[stage + 1 :]))
    if width is None or not later:
        return found

    def bound(key: tuple[int, _Held]) -> int:
        """Below this the ranks that have stages to come cannot end all."""
        return -(-(problem.rest(key[0]) + sum(key[1][rank][0] for rank in later)) // len(later))

    if limits.load is not None:
        found = {key: entry for key, entry in found.items() if bound(key) <= limits.load}
    if len(found) <= width:
        return found
    share = problem.rest(0) * (len(problem.placement) - stage - 1) // len(problem.placement)
    order = sorted(
        found, key=lambda key: (max(bound(key), found[key][0]), abs(problem.rest(key[0]) - share), found[key])
    )
    return {key: found[key] for key in order[:width]}


def _nothing(stage: int, start: int, end: int) -> int:
    return 0


def _check_stages(layers: int, placement: Sequence[int]) -> None:
    if len(placement) > layers:
        raise CompositionError(
            f"{len(placement)} pipeline stages, but the model has only {layers} layers. Use a pp (times chunks) of at most "
            f"{layers}."
        )


def _refuse(problem: _Problem, room: int) -> NoReturn:
    """Raise CompositionError with what the split that needs the least would need."""
    least = _Problem(problem.layers, problem.placement, problem.need, _nothing, lambda start: 0)
    sizes = _best(least, None) or ()
    raise CompositionError(
        f"no split of {problem.layers} layers on {len(problem.placement)} stages fits into {gigabytes(room)} a rank: the one "
        f"that needs the least is {list(sizes)}, with {gigabytes(max(rank_needs(problem, sizes)))} on its fullest rank. Give "
        "a rank more room, raise pp or tp, make the rows of a microbatch fewer, or take a schedule that keeps fewer "
        "microbatches alive."
    )


def rank_needs(problem: _Problem, sizes: Sequence[int]) -> list[int]:
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
