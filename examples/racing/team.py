"""The processes of one contender, seen from the race: started, asked for answers within a time, and ended."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .setting import Contender, Job
from .worker import Failed, work

TAIL = 20
"""Lines of what a dead process printed that are shown."""


class Out(Exception):
    """A contender that cannot go on: why, and what it printed."""

    def __init__(self, why: str, text: str = "") -> None:
        super().__init__(why)
        self.text = text


class Team:
    """Processes that have the environment which torchrun would give them, if there are several.

    They are forks of a server that has imported torch: imports take longer than some races.
    """

    def __init__(self, contender: Contender, sizes: Mapping[str, int], timeout: float) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed"])
        self.timeout = timeout
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        port = _free_port()
        for rank in range(contender.processes):
            mine, theirs = context.Pipe()
            environ = _environ(rank, contender.processes, port)
            arguments = theirs, Job(contender, sizes, rank), environ, str(self._log(rank)), timeout
            process = context.Process(target=work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def ask(self, command: str) -> list[Any]:
        """The answers of all processes to a command; raises Out."""
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send(command)
            except OSError:
                raise self._end_of(rank) from None
        return self.answers()

    def answers(self) -> list[Any]:
        """What all processes say next. Raises Out when one fails, or when they do not speak in time."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout
        while missing := [rank for rank in range(len(self._pipes)) if rank not in found]:
            ready = wait([self._pipes[rank] for rank in missing], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise Out(f"no answer of process {', '.join(map(str, missing))} within {self.timeout:.0f} s")
            for rank in missing:
                if self._pipes[rank] in ready:
                    found[rank] = self._receive(rank)
        return [found[rank] for rank in sorted(found)]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send("stop")
        deadline = time.monotonic() + 1.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def _receive(self, rank: int) -> Any:
        try:
            answer = self._pipes[rank].recv()
        except (EOFError, OSError):
            raise self._end_of(rank) from None
        if isinstance(answer, Failed):
            raise Out(answer.why, answer.text)
        return answer

    def _end_of(self, rank: int) -> Out:
        """What is known of a process that ended without a word."""
        self._processes[rank].join(5.0)
        log = self._log(rank)
        tail = log.read_text(errors="replace").strip().splitlines()[-TAIL:] if log.exists() else []
        return Out(f"process {rank} ended with exit code {self._processes[rank].exitcode}", "\n".join(tail))

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"{rank}.log"


def _environ(rank: int, processes: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    if processes == 1:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("localhost", 0))
        return int(made.getsockname()[1])
