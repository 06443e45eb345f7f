"""What ``python -m functional_par schedule`` is asked: its flags, and the schedule and the costs that they stand for."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from functional_par.config import Config, reader
from functional_par.config.flags import Parser
from functional_par.errors import ConfigError
from functional_par.pipeline.costs import Costs
from functional_par.pipeline.schedule import Schedule
from functional_par.pipeline.schedule_file import read_schedule
from functional_par.pipeline.schedules import make_schedule, schedule_names

MOST_ACTIONS = 200_000
COSTS = ("forward", "input_backward", "weight_backward", "transfer")

DESCRIPTION = """Draw a pipeline schedule: proved, then simulated with the costs that are given, or measured (--trace).

python -m functional_par schedule --schedule 1f1b --stages 4 --microbatches 8
"""


@dataclass(frozen=True)
class Options:
    """The command line.

    Attributes:
        schedule: what to show; None for that of a trace.
        costs: of its actions.
        trace: a file of a measured run, or None.
        json: print one object instead of a picture.
        output, csv_output: files to write, or None.
    """

    schedule: Schedule | None
    costs: Costs
    trace: str | None
    json: bool
    output: str | None
    csv_output: str | None


def parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    plain = argparse.RawDescriptionHelpFormatter
    result = Parser(
        prog="python -m functional_par schedule", description=DESCRIPTION, allow_abbrev=False, formatter_class=plain
    )
    add = result.add_argument
    names = ", ".join(schedule_names())
    add("--schedule", metavar="NAME", help=f"{names}, another name of one, or a CSV file of actions; default 1f1b")
    add("--stages", type=reader.integer, metavar="N", help="ranks of the pipeline")
    add("--microbatches", type=reader.integer, metavar="N", help="microbatches of a step")
    add("--chunks", type=reader.integer, metavar="N", help="stages on each rank, for schedules that have several")
    for name, what in zip(COSTS, ("a forward", "an input-backward", "a weight-backward", "a message"), strict=True):
        default = 0 if name == "transfer" else 1
        several = "" if name == "transfer" else ", or X,X,... one a stage"
        add(flag(name), metavar="X", help=f"time of {what}: a number{several}; default {default}")
    add("--config-file", metavar="YAML", help="take schedule, stages, microbatches and chunks from a configuration")
    add("--trace", metavar="FILE", help="draw a real run instead, from the file that it wrote (--trace-file)")
    add("--json", action="store_true", help="print bubble, makespan, live_activations and actions as one JSON object")
    add("--output", metavar="FILE", help="draw to a file: .svg, .png or .pdf, or .json for Perfetto")
    add(
        "--csv-output", metavar="FILE", help="write the actions as CSV, a line a rank, as torch's pipelining reads them"
    )
    return result


def flag(name: str) -> str:
    """The flag of a cost."""
    return f"--{name.replace('_', '-')}-cost"


def parse(argv: Sequence[str]) -> Options:
    """The options of the command. Raises ConfigError or ScheduleError for what is wrong with them."""
    asked = parser().parse_args(argv)
    if asked.trace is not None:
        _check_alone(asked)
    schedule = None if asked.trace is not None else _schedule(asked)
    costs = Costs(**{name: value for name in COSTS if (value := _cost(asked, name, schedule)) is not None})
    return Options(schedule, costs, asked.trace, asked.json, asked.output, asked.csv_output)


def _check_alone(asked: argparse.Namespace) -> None:
    """A trace has its schedule and its costs in it."""
    others = ("schedule", "stages", "microbatches", "chunks", "config_file", *(f"{name}_cost" for name in COSTS))
    for name in others:
        if getattr(asked, name) is not None:
            raise ConfigError(
                f"--trace {asked.trace} has the schedule of its run: leave out --{name.replace('_', '-')}, which is for a "
                "simulated one."
            )


def _schedule(asked: argparse.Namespace) -> Schedule:
    given = {
        "schedule": asked.schedule,
        "stages": asked.stages,
        "microbatches": asked.microbatches,
        "chunks": asked.chunks,
    }
    for name, value in given.items():
        if isinstance(value, int) and value < 1:
            raise ConfigError(f"--{name} {value}: an integer of at least 1 is expected.")
    if asked.config_file is not None:
        given = {**_configured(asked.config_file), **{key: v for key, v in given.items() if v is not None}}
    name = given["schedule"] or "1f1b"
    if name.endswith(".csv"):
        return _from_file(name, given)
    for key in ("stages", "microbatches"):
        if given[key] is None:
            raise ConfigError(f"--{key} is missing: a number, or a --config-file that has it.")
    actions = given["stages"] * given["microbatches"] * (given["chunks"] or 1)
    if actions > MOST_ACTIONS:
        raise ConfigError(
            f"--stages {given['stages']} and --microbatches {given['microbatches']} make {actions} forwards; a schedule of at "
            f"most {MOST_ACTIONS} is shown. Take fewer."
        )
    return make_schedule(name, given["stages"], given["microbatches"], given["chunks"])


def _configured(path: str) -> dict[str, Any]:
    """What a configuration says of its pipeline."""
    config = Config.load(path)
    parallelism = config.sections.parallelism
    return {
        "schedule": parallelism.pp_engine,
        "stages": parallelism.pp,
        "microbatches": config.microbatches,
        "chunks": parallelism.pp_chunks,
    }


def _from_file(path: str, given: dict[str, Any]) -> Schedule:
    schedule = read_schedule(path)
    if given["chunks"] is not None:
        raise ConfigError(f"--chunks {given['chunks']}: {path} says itself which stages a rank has. Leave it out.")
    for key, found in (("stages", schedule.ranks), ("microbatches", schedule.microbatches)):
        if given[key] not in (None, found):
            raise ConfigError(f"--{key} {given[key]}: {path} has {found}. Leave it out, or make them equal.")
    return schedule


def _cost(asked: argparse.Namespace, name: str, schedule: Schedule | None) -> float | tuple[float, ...] | None:
    text = getattr(asked, f"{name}_cost")
    if text is None:
        return None
    try:
        numbers = tuple(reader.number(word.strip()) for word in text.split(","))
    except ValueError:
        numbers = (math.nan,)
    if not all(0 <= number < math.inf for number in numbers):
        several = "" if name == "transfer" else ", or one for each stage, as in 1,1,2"
        raise ConfigError(f"{flag(name)} {text}: a number of at least 0 is expected{several}.")
    if len(numbers) == 1:
        return numbers[0]
    if name == "transfer":
        raise ConfigError(f"{flag(name)} {text}: one number is expected, the same for all messages.")
    if schedule is not None and len(numbers) != schedule.stages:
        raise ConfigError(
            f"{flag(name)} {text}: {len(numbers)} numbers for {schedule.stages} stages. Give one, or one a stage."
        )
    return numbers
