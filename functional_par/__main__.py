"""``python -m functional_par plan|explain --config-file specs/x.yaml``: what needs no launcher and no rank.

``python -m functional_par schedule --schedule 1f1b --stages 4 --microbatches 8`` draws a pipeline schedule; it has flags of its
own, see ``python -m functional_par schedule --help``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from functional_par.config import flags
from functional_par.report import exit_code, explained, header, say


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan of a configuration, the table of its leaves, or a schedule. Raises ParallelError for what is wrong."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["schedule"]:
        from functional_par.report import schedule_command

        schedule_command.main(argv[1:])
        return
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
        say(str(explained(config, program.plan(mesh))))


if __name__ == "__main__":
    sys.exit(exit_code(main))
