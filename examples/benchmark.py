"""Race our step against what one could use instead: a hand-written torch loop, torch's own parallel parts, and jax.

    python examples/benchmark.py --model 33m --layouts one,tp2,pp2,dp2 --json out.json --plot out.png
    python examples/benchmark.py --model tiny --layouts tp2 --who 'ours*,torch dtensor*' --rounds 20

Contenders start from the same weights and take the same steps. They are processes that take turns, with one thread a rank, so
that all see the same machine. `--list` shows who can race. Rows of jax need jax, the plot needs matplotlib:
pip install 'functional_par[benchmark]'.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from racing.contenders import USUAL, chosen, contenders
from racing.plot import draw
from racing.race import Pace, Race
from racing.results import Row, compared, failures, row_of
from racing.setting import LAYOUTS, MODELS
from racing.table import notes, table_of
from rich.console import Console

STEPS = {"33m": 1, "tiny": 5}
"""Steps in a turn."""


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Race as the arguments say; returns the rows."""
    args = _arguments(argv)
    layouts, patterns = args.layouts.split(","), args.who.split(",")
    if args.list:
        for layout in layouts:
            print("\n".join(f"{layout:<8} {each.who}" for each in contenders(layout)))
        return []
    pace = Pace(args.rounds, args.steps or STEPS[args.model], args.timeout)
    rows: list[Row] = []
    out: dict[str, dict[str, str]] = {}
    for layout in layouts:
        race = Race(MODELS[args.model], pace, lambda line, layout=layout: print(f"{layout}: {line}", file=sys.stderr))
        race.run(chosen(layout, patterns))
        rows += [row_of(args.model, measured) for measured in race.measured.values()]
        out[layout] = race.out
    rows = compared(rows)
    _show(rows, out)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)
    if args.plot:
        draw(rows, args.plot)
    return rows


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=MODELS, default="33m")
    add("--layouts", default="one", help=f"separated by commas: {','.join(LAYOUTS)}")
    add("--rounds", type=int, default=7, help="counted turns of each contender")
    add("--steps", type=int, help="steps in a turn, by default 1 of 33m and 5 of tiny")
    add("--who", default=USUAL, help="patterns of names, separated by commas, such as 'usual,ours* zbv'")
    add("--timeout", type=float, default=300.0, help="seconds after which a contender that does not answer is out")
    add("--list", action="store_true", help="show who can race, and stop")
    add("--json", metavar="FILE", help="write the rows here")
    add("--plot", metavar="FILE", help="draw time and memory here")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.layouts.split(",") if name not in LAYOUTS]:
        parser.error(f"unknown layout {', '.join(unknown)}; there are {', '.join(LAYOUTS)}")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least one turn is needed")
    if args.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'functional_par[benchmark]'")
    return args


def _show(rows: Sequence[Row], out: dict[str, dict[str, str]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table_of(rows))
    for line in [*notes(rows), *(f"out: {line}" for line in failures(out))]:
        console.print(line, markup=False, highlight=False)


if __name__ == "__main__":
    main()
