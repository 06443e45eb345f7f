"""What a running training shows and keeps: a progress line on a terminal, plain lines elsewhere, and the metrics file.

Rank 0 alone shows and writes; every rank keeps the history, which is the same everywhere.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from functional_par.report.metrics_file import metrics_file

if TYPE_CHECKING:
    from functional_par.comm.base import World
    from functional_par.config import Config

Record = dict[str, Any]
Show = Callable[[Record], None]


class Log:
    """Call it with the metrics of each step; ``history`` holds one record a step."""

    def __init__(self, shows: list[Show]) -> None:
        self.history: list[Record] = []
        self._shows = shows
        self._before = time.perf_counter()

    def __call__(self, metrics: Record) -> None:
        """Add the step's number, seconds and speed; show and write it."""
        now = time.perf_counter()
        seconds, self._before = now - self._before, now
        speed = metrics["tokens"] / max(seconds, 1e-9)
        record = {"step": len(self.history) + 1, **metrics, "seconds": seconds, "tokens_per_s": speed}
        self.history.append(record)
        for show in self._shows:
            show(record)


@contextmanager
def progress(world: World, config: Config) -> Iterator[Log]:
    """A Log for the steps of one run, to be used around the training loop."""
    with ExitStack() as stack:
        shows: list[Show] = []
        if world.rank == 0:
            path = config.sections.logging.metrics_file
            if path is not None:
                shows.append(stack.enter_context(metrics_file(path)))
            shows.append(stack.enter_context(_terminal(config)))
        yield Log(shows)


@contextmanager
def _terminal(config: Config) -> Iterator[Show]:
    console = Console(file=sys.stdout)
    if not console.is_terminal:
        interval = config.sections.logging.iteration_step_info_interval or 1
        yield _plain(config.steps, interval)
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[left]}"))
    with Progress(*columns, console=console, refresh_per_second=4) as bar:
        task = bar.add_task("starting", total=config.steps, left="")
        clock = _Clock(config.steps)

        def show(record: Record) -> None:
            left = f"{clock.left(record)} left"
            bar.update(task, completed=record["step"], description=line(record, config.steps), left=left)

        yield show


def _plain(steps: int, interval: int) -> Show:
    clock = _Clock(steps)

    def show(record: Record) -> None:
        left = clock.left(record)
        if record["step"] % interval == 0 or record["step"] in (1, steps):
            print(f"{line(record, steps)}  {left} left", flush=True)

    return show


def line(record: Record, steps: int) -> str:
    """One step on one line.

    >>> line({"step": 7, "loss": 2.5, "grad_norm": 0.125, "lr": 3e-4, "tokens_per_s": 12345.6}, steps=100)
    'step   7/100  loss 2.5000  grad norm 0.125  lr 3.0e-04  12,346 tokens/s'
    """
    return (
        f"step {record['step']:>{len(str(steps))}}/{steps}  loss {record['loss']:.4f}  "
        f"grad norm {record['grad_norm']:.3f}  lr {record['lr']:.1e}  {record['tokens_per_s']:,.0f} tokens/s"
    )


class _Clock:
    """Time left, from the speed of the steps after the first, which also warms up."""

    def __init__(self, steps: int) -> None:
        self.steps, self.spent = steps, 0.0

    def left(self, record: Record) -> str:
        self.spent += record["seconds"] if record["step"] > 1 else 0.0
        each = self.spent / (record["step"] - 1) if record["step"] > 1 else record["seconds"]
        minutes, seconds = divmod(round(each * (self.steps - record["step"])), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
