"""Command-line flags: each is a key of the configuration and takes the place of what the file says."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from functional_par.config import reader
from functional_par.config.config import Config
from functional_par.errors import ConfigError
from functional_par.launch import launched
from functional_par.run import Backend


@dataclass(frozen=True)
class Flag:
    """``--name`` sets ``key``; a bool is ``--name`` and ``--no-name``."""

    name: str
    key: str
    kind: type
    help: str


FLAGS = (
    Flag("--dp", "parallelism.dp", int, "data-parallel replicas"),
    Flag("--tp", "parallelism.tp", int, "tensor-parallel ranks"),
    Flag("--pp", "parallelism.pp", int, "pipeline stages"),
    Flag("--cp", "parallelism.cp", int, "context-parallel ranks"),
    Flag("--ep", "parallelism.ep", int, "expert-parallel ranks"),
    Flag("--tp-mode", "parallelism.tp_mode", str, "all-reduce or reduce-scatter"),
    Flag("--tp-async", "parallelism.tp_linear_async_communication", bool, "overlap tensor-parallel communication"),
    Flag(
        "--pp-engine",
        "parallelism.pp_engine",
        str,
        "the pipeline schedule, or a CSV file of it, relative to the current directory",
    ),
    Flag("--pp-chunks", "parallelism.pp_chunks", int, "stages on each pipeline rank"),
    Flag("--steps", "tokens.train_steps", int, "optimizer steps"),
    Flag("--sequence-length", "tokens.sequence_length", int, "tokens a sequence"),
    Flag("--global-batch-size", "tokens.global_batch_size", int, "sequences a step, whatever the layout"),
    Flag("--microbatches", "tokens.microbatches", int, "microbatches a replica and step"),
    Flag("--micro-batch-size", "tokens.micro_batch_size", int, "sequences a microbatch and replica"),
    Flag("--lr", "optimizer.learning_rate_scheduler.learning_rate", float, "peak learning rate"),
    Flag(
        "--zero",
        "optimizer.zero_stage",
        int,
        "share out over dp and ep: 1 optimizer state, 2 gradients too, 3 parameters too",
    ),
    Flag("--clip", "optimizer.clip_grad", float, "largest gradient norm"),
    Flag("--dtype", "model.dtype", str, "float32, float64 (for proofs) or bfloat16"),
    Flag("--engine", "general.engine", str, "func, tape or compile: how layers are differentiated"),
    Flag("--remat", "parallelism.remat", str, "what blocks keep for backward: none (all is kept), full or selective"),
    Flag("--tie", "model.tie", bool, "tie the head to the embedding"),
    Flag("--seed", "general.seed", int, "of initial values, and of the data unless data.seed is given"),
    Flag("--text", "data.text", str, "a text file or folder to read as bytes, relative to the current directory"),
    Flag("--tokens", "data.tokens", str, "a file of token ids, relative to the current directory"),
    Flag("--token-dtype", "data.token_dtype", str, "uint16 or uint32, for raw token files"),
    Flag(
        "--metrics-file",
        "logging.metrics_file",
        str,
        "write one JSON object a step to it, relative to the current directory",
    ),
    Flag(
        "--trace-file",
        "logging.trace_file",
        str,
        "write the timeline of step logging.trace_step to it, relative to the current directory",
    ),
    Flag("--log-interval", "logging.iteration_step_info_interval", int, "steps between plain lines"),
)

KINDS: Mapping[type, Callable[[str], Any]] = {int: reader.integer, float: reader.number, str: str}
"""How a flag's word is read: numbers as in the file, so that one spelling has one meaning."""

MOST_SHOWN = 4096
"""Ranks in a table of groups, whose size grows with their square."""

DISPLACES = {
    "tokens.global_batch_size": ("tokens.micro_batch_size",),
    "tokens.micro_batch_size": ("tokens.global_batch_size",),
    "tokens.microbatches": ("tokens.batch_accumulation_per_replica",),
    "data.text": ("data.tokens", "data.token_dtype"),
    "data.tokens": ("data.text", "data.token_dtype"),
}
"""Keys of the file that a flag replaces besides its own, since they say the same thing in another way."""


@dataclass(frozen=True)
class Options:
    """The command line.

    Attributes:
        config: the file under the flags.
        backend: where ranks run; None leaves it to ``fp.run``.
        print_groups: show the mesh and stop; of ``config``, just the mesh is then known to be possible.
        explain: show the table of leaves before training.
    """

    config: Config
    backend: Backend | None = None
    print_groups: bool = False
    explain: bool = False


class Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that one place decides which rank speaks and with which exit code."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See --help.")


def parser(description: str | None = None) -> argparse.ArgumentParser:
    """The parser of all flags that stand for a key, and of ``--config-file``."""
    plain = argparse.RawDescriptionHelpFormatter
    result = Parser(description=description, allow_abbrev=False, formatter_class=plain)
    result.add_argument("--config-file", required=True, metavar="YAML", help="ours or nanotron's; see specs/")
    for flag in FLAGS:
        how: dict[str, Any] = {
            "type": KINDS.get(flag.kind),
            "metavar": {int: "N", float: "X", str: "WORD"}.get(flag.kind),
        }
        if flag.kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        result.add_argument(flag.name, dest=flag.key, default=None, help=f"{flag.help} ({flag.key})", **how)
    return result


def config(arguments: argparse.Namespace, whole: bool = True) -> Config:
    """The file that ``--config-file`` names, under the flags; ``whole`` as for ``Config.from_dict``. Raises ConfigError."""
    given = {flag: getattr(arguments, flag.key) for flag in FLAGS if getattr(arguments, flag.key) is not None}
    overrides: dict[str, Any] = {}
    for flag in given:
        overrides.update(dict.fromkeys(DISPLACES.get(flag.key, ())))
    overrides.update({flag.key: value for flag, value in given.items()})
    path = arguments.config_file
    if not path.strip():
        raise ConfigError(f"--config-file {path!r}: a path is needed, that of a YAML file such as specs/tiny.yaml.")
    return Config.from_dict(reader.read(path), path, overrides, {flag.key: flag.name for flag in given}, whole)


def parse(argv: Sequence[str] | None = None, description: str | None = None) -> Options:
    """The options of a training script, from ``sys.argv`` if ``argv`` is None.

    Raises:
        ConfigError: for an unknown flag, a value of a wrong type, or anything wrong with the configuration.
    """
    found = parser(description)
    found.add_argument(
        "--backend", choices=("threads", "gloo", "nccl"), help="default: threads, under torchrun processes"
    )
    found.add_argument("--print-groups", action="store_true", help="show who is in which group, and stop")
    found.add_argument("--explain", action="store_true", help="show every leaf's sharding and debts first")
    arguments = found.parse_args(argv)
    check_backend(arguments.backend)
    found_config = config(arguments, whole=not arguments.print_groups)
    if arguments.print_groups and found_config.mesh().size > MOST_SHOWN:
        raise ConfigError(
            f"--print-groups: {found_config.mesh()} has {found_config.mesh().size} ranks, a line each; at most {MOST_SHOWN} "
            "are shown. Groups of a smaller mesh have the same pattern."
        )
    return Options(found_config, arguments.backend, arguments.print_groups, arguments.explain)


def check_backend(backend: str | None) -> None:
    """Raise ConfigError for a backend that this process cannot have."""
    if backend == "threads" and launched() and os.environ["WORLD_SIZE"] != "1":
        raise ConfigError(
            f"--backend threads: torchrun started {os.environ['WORLD_SIZE']} processes, and each would run all ranks. "
            "Start it with python, or leave --backend out."
        )
    if backend in ("gloo", "nccl") and not launched():
        raise ConfigError(
            f"--backend {backend}: its ranks are processes. Start it with torchrun --nproc-per-node N, or take threads."
        )
    if backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError("--backend nccl: there is no CUDA device here. Take gloo.")
