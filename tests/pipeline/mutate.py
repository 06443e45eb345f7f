"""Random changes of schedules, small ones for the most part: some still run, most do not."""

from __future__ import annotations

from functional_par.pipeline.schedule import Action, Schedule, chain
from functional_par.pipeline.schedules import chunks_of, make_schedule, schedule_names

SIZES = [(1, 1), (1, 3), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1)]


def mutant(rng):
    """A schedule of one to three changes, with the edges, stages and microbatches that it was made for."""
    name, (p, m) = rng.choice(schedule_names()), rng.choice(SIZES)
    made = make_schedule(name, p, m)
    stages = p * chunks_of(name)
    rows = [list(row) for row in made.rows]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice(CHANGES)(rng, rows, stages, m)
    edges = chain(stages)
    if stages > 2 and rng.random() < 0.2:
        edges = (*edges, (0, rng.randrange(2, stages)))
    return Schedule(f"mutant of {name}", tuple(map(tuple, rows))), edges, stages, m


def _some(rng, rows):
    """A rank with actions, and the index of one; a rank without any has none to change."""
    rank = rng.choice([rank for rank, row in enumerate(rows) if row] or [0])
    return rank, rng.randrange(len(rows[rank])) if rows[rank] else None


def swap_neighbours(rng, rows, stages, microbatches):
    rank, at = _some(rng, rows)
    if at:
        rows[rank][at - 1 : at + 1] = rows[rank][at - 1 : at + 1][::-1]


def swap(rng, rows, stages, microbatches):
    rank, at = _some(rng, rows)
    if at is not None:
        other = rng.randrange(len(rows[rank]))
        rows[rank][at], rows[rank][other] = rows[rank][other], rows[rank][at]


def move(rng, rows, stages, microbatches):
    rank, at = _some(rng, rows)
    if at is not None:
        rows[rank].insert(rng.randrange(len(rows[rank])), rows[rank].pop(at))


def drop(rng, rows, stages, microbatches):
    rank, at = _some(rng, rows)
    if at is not None:
        del rows[rank][at]


def duplicate(rng, rows, stages, microbatches):
    rank, at = _some(rng, rows)
    if at is not None:
        rows[rank].insert(rng.randrange(len(rows[rank]) + 1), rows[rank][at])


def change(rng, rows, stages, microbatches):
    """A kind, stage or microbatch, sometimes one that there is not."""
    rank, at = _some(rng, rows)
    if at is not None:
        fields = {"kind": "FBIW", "stage": range(stages + 1), "microbatch": range(microbatches + 1)}
        field = rng.choice(sorted(fields))
        rows[rank][at] = rows[rank][at]._replace(**{field: rng.choice(fields[field])})


def move_to_another_rank(rng, rows, stages, microbatches):
    rank, at = _some(rng, rows)
    if at is not None:
        action = rows[rank].pop(at)
        target = rng.choice(rows)
        target.insert(rng.randrange(len(target) + 1), action)


def reverse(rng, rows, stages, microbatches):
    row = rng.choice(rows)
    first, end = sorted(rng.choices(range(len(row) + 1), k=2))
    row[first:end] = row[first:end][::-1]


def exchange_ranks(rng, rows, stages, microbatches):
    a, b = rng.choices(range(len(rows)), k=2)
    rows[a], rows[b] = rows[b], rows[a]


def merge_ranks(rng, rows, stages, microbatches):
    """One rank does the work of two, some of it in between; the other is left without stages."""
    a, b = rng.choices(range(len(rows)), k=2)
    if a != b:
        cut = rng.randrange(len(rows[a]) + 1)
        rows[a][cut:cut], rows[b] = rows[b], []


def rename_microbatches(rng, rows, stages, microbatches):
    """On all ranks, or on one."""
    names = rng.sample(range(microbatches), microbatches)
    for row in rows if rng.random() < 0.5 else [rng.choice(rows)]:
        row[:] = [action._replace(microbatch=names[action.microbatch % microbatches]) for action in row]


def split_a_backward(rng, rows, stages, microbatches):
    """A whole one; its second part anywhere in the row."""
    rank, at = _some(rng, rows)
    if at is not None and rows[rank][at].kind == "B":
        stage, _, microbatch = rows[rank][at]
        rows[rank][at] = Action(stage, "I", microbatch)
        rows[rank].insert(rng.randrange(len(rows[rank]) + 1), Action(stage, "W", microbatch))


CHANGES = (
    swap_neighbours,
    swap_neighbours,
    swap,
    move,
    drop,
    duplicate,
    change,
    move_to_another_rank,
    reverse,
    exchange_ranks,
    merge_ranks,
    rename_microbatches,
    split_a_backward,
)
