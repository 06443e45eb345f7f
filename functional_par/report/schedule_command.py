"""``python -m functional_par schedule``: a schedule, or a run of one, as a picture, as numbers and as files."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from functional_par.errors import ScheduleError
from functional_par.pipeline.costs import Costs
from functional_par.pipeline.schedule import Row, Schedule
from functional_par.pipeline.schedule_file import as_csv
from functional_par.pipeline.simulate import simulate
from functional_par.pipeline.timeline import Timeline
from functional_par.report import chrome_trace, draw, files
from functional_par.report.gantt import gantt, legend
from functional_par.report.picture import Panel
from functional_par.report.prepare import say
from functional_par.report.replay import order, replay, spread
from functional_par.report.schedule_options import Options, parse
from functional_par.report.text import table

WIDTH = 120
"""Columns of a measured timeline where there is no terminal. A simulated one has a natural width."""


@dataclass(frozen=True)
class Shown:
    """What there is to show.

    Attributes:
        title: what it is, in words.
        timeline: simulated, or measured.
        actions: of each rank of the timeline.
        live: the most activations that each rank keeps at a time; empty if it is not known.
        schedule: what is simulated; None for a run of no schedule that can be told.
        beside: of a measured timeline, the simulated one of the same schedule.
        labels: names of the rows.
    """

    title: str
    timeline: Timeline
    actions: tuple[Row, ...]
    live: tuple[int, ...]
    schedule: Schedule | None
    beside: Timeline | None = None
    labels: tuple[str, ...] = ()


def main(argv: Sequence[str]) -> None:
    """Verify, simulate and show a schedule. Files are written first, so that what is printed is true.

    Raises:
        ParallelError: whatever the user can mend; nothing has been printed then.
    """
    options = parse(argv)
    if options.output is not None:
        draw.check(options.output, "--output")
    shown = _measured(options) if options.schedule is None else _simulated(options.schedule, options.costs)
    _write(options, shown)
    if options.json:
        say(json.dumps(as_data(shown)))
    else:
        _print(shown)


def _simulated(schedule: Schedule, costs: Costs) -> Shown:
    found = simulate(schedule, costs)  # which proves it first
    title = f"{schedule.name}: {_counts(schedule)}"
    return Shown(title, found.timeline, schedule.rows, tuple(found.live), schedule)


def _measured(options: Options) -> Shown:
    trace = chrome_trace.load(str(options.trace), "--trace")
    timeline, name = trace.timeline, trace.schedule or "schedule"
    try:
        found = replay(timeline, name)
        same = simulate(found.schedule, found.costs)
    except ScheduleError:  # no schedule that can be proved, as when a step stopped half-way
        return Shown(f"{name}, measured", timeline, order(timeline), (), None, labels=trace.labels)
    title = f"{name}, measured: {_counts(found.schedule)}"
    live = tuple(spread(found, same.live))
    return Shown(title, timeline, order(timeline), live, found.schedule, same.timeline, trace.labels)


def _counts(schedule: Schedule) -> str:
    def count(number: int, what: str, plural: str) -> str:
        return f"{number} {what if number == 1 else plural}"

    return ", ".join(
        (
            count(schedule.ranks, "rank", "ranks"),
            count(schedule.stages, "stage", "stages"),
            count(schedule.microbatches, "microbatch", "microbatches"),
        )
    )


def as_data(shown: Shown) -> dict[str, Any]:
    """The object that ``--json`` prints.

    ``bubble`` is the idle share of the makespan, mean over the ranks; ``live_activations`` has one number a rank, or null if
    it is not known; ``actions`` has a list a rank of actions in order, each stage, kind and microbatch. Of a measured run
    ``simulated`` has the bubble and makespan of the same schedule with the mean times of each stage.
    """
    data: dict[str, Any] = {
        "schedule": shown.schedule.name if shown.schedule else None,
        "bubble": shown.timeline.bubble,
        "makespan": shown.timeline.makespan,
        "live_activations": list(shown.live) or None,
        "actions": [list(map(str, row)) for row in shown.actions],
    }
    if shown.beside is not None:
        data["simulated"] = {"bubble": shown.beside.bubble, "makespan": shown.beside.makespan}
    return data


def _write(options: Options, shown: Shown) -> None:
    if options.output is not None:
        panels = [Panel(shown.timeline, f"{shown.title}, bubble {shown.timeline.bubble:.1%}", shown.labels)]
        if (same := shown.beside) is not None:
            title = f"simulated, with the mean times of each stage, bubble {same.bubble:.1%}"
            panels.append(Panel(same, title, [f"pp {rank}" for rank in range(same.ranks)]))
        draw.draw(options.output, panels, shown.schedule, "--output")
    if options.csv_output is not None:
        rows = shown.schedule.rows if shown.schedule else shown.actions
        files.write(options.csv_output, as_csv(rows, "\n").encode(), "--csv-output")


def _print(shown: Shown) -> None:
    console = Console(file=sys.stdout)
    columns = console.width if console.is_terminal else WIDTH if shown.timeline.unit else None
    colored = console.is_terminal and console.color_system is not None and not console.no_color
    text = gantt(shown.timeline, columns, shown.labels, colored)
    say(f"{shown.title}\n")
    if colored:
        console.print(text, highlight=False, no_wrap=True, overflow="ignore", crop=False)
    else:
        say(text.plain)
    say(f"\n{legend(shown.timeline, columns, shown.labels)}\n\n{summary(shown)}")


def summary(shown: Shown) -> str:
    """Bubble and makespan in words, and a table of the ranks."""
    timeline = shown.timeline
    unit = " s" if timeline.unit == "s" else ""
    lines = [f"bubble    {timeline.bubble:.1%} of a makespan of {timeline.makespan:.4g}{unit}, mean over the ranks"]
    if shown.beside is not None:
        lines.append(
            f"simulated {shown.beside.bubble:.1%} of {shown.beside.makespan:.4g}{unit}, with the mean times of each stage"
        )
    elif shown.schedule is not None and not timeline.unit:
        p, m = shown.schedule.ranks, shown.schedule.microbatches
        lines.append(
            f"1f1b      {(p - 1) / (m + p - 1):.1%} = (p - 1) / (m + p - 1), as afab, if all stages cost the same"
        )
    rows = [("rank", "stages", "busy", "live activations")]
    for rank, row in enumerate(shown.actions):
        stages = " ".join(map(str, sorted({action.stage for action in row})))
        live = str(shown.live[rank]) if shown.live else "unknown"
        rows.append((str(rank), stages, f"{timeline.busy[rank]:.4g}{unit}", live))
    return "\n".join(lines) + "\n\n" + table(rows)
