"""``python -m functional_par plan|explain --config-file specs/x.yaml``: what needs no launcher and no rank."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from functional_par.config import flags
from functional_par.report import exit_code, header, say


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan of a configuration, or the table of its leaves. Raises ParallelError for whatever is wrong."""
    found = flags.parser(__doc__)
    found.prog = "python -m functional_par"
    found.add_argument("command", choices=("plan", "explain"), help="the layout in short, or every leaf of it")
    arguments: argparse.Namespace = found.parse_args(argv)
    config = flags.config(arguments)
    program, mesh = config.program(), config.mesh()
    if arguments.command == "plan":
        say(header(config, program.plan(mesh)))
        if mesh.size <= flags.MOST_SHOWN:
            say("\n" + mesh.table())
    else:
        say(str(program.explain(mesh)))


if __name__ == "__main__":
    sys.exit(exit_code(main))
