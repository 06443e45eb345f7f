"""A process of a contender: it gets ready, then takes its turns when the race asks, and answers with times and losses."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import itertools
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Protocol

from .setting import Job

Loss = float | None


@dataclass(frozen=True)
class Ready:
    """Every rank of the process is about to take its first step; ``info`` is what the first one said about itself."""

    info: Mapping[str, Any]


@dataclass(frozen=True)
class Turn:
    """Some steps of all ranks of one process.

    Attributes:
        start, end: seconds on the clock that all processes of the machine share.
        cpu: seconds of processor time, user and system, of all threads.
        losses: of the last step, from the ranks that know it.
        rss: peak resident memory in bytes, since the last ``forget``.
    """

    start: float
    end: float
    cpu: float
    losses: tuple[float, ...]
    rss: int


@dataclass(frozen=True)
class Failed:
    """What went wrong, in a line and in full."""

    why: str
    text: str


class Serve(Protocol):
    """What a contender calls on each of its ranks once it is ready; returns when the race is over."""

    def __call__(
        self, step: Callable[[], Loss], sent: Callable[[], int | None] = ..., info: Mapping[str, Any] = ...
    ) -> None:
        """
        Args:
            step: makes one step and returns the loss if this rank knows it.
            sent: makes one step and returns the bytes that this rank put on the wire in it; None if that is not known.
            info: about this contender, for the rows.
        """


class Server:
    """Passes the commands of the race on to the ranks of this process, and their answers back."""

    def __init__(self, pipe: Connection, ranks: int, timeout: float) -> None:
        self._pipe, self._timeout = pipe, timeout
        self._commands: list[SimpleQueue[str]] = [SimpleQueue() for _ in range(ranks)]
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._places = itertools.count()

    def serve(
        self,
        step: Callable[[], Loss],
        sent: Callable[[], int | None] = lambda: None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        """See ``Serve``."""
        mine = self._commands[next(self._places)]
        self._answers.put(info or {})
        while (command := mine.get()) != "stop":
            self._answers.put(sent() if command == "sent" else _turn(step, int(command)))

    def relay(self) -> None:
        """Runs in a thread of its own. A race that has ended, or a turn that does not, ends the process."""
        try:
            self._pipe.send(Ready(self._collect()[0]))
            while (command := self._pipe.recv()) != "stop":
                self._pipe.send(self._answer(command))
            self._tell("stop")
        except (EOFError, OSError):
            os._exit(1)

    def _answer(self, command: str) -> Any:
        if command == "forget":
            return _forget_peak()
        before = time.process_time()
        self._tell(command)
        turns = self._collect()
        if command == "sent":
            return turns
        starts, ends, losses = zip(*turns, strict=True)
        known = tuple(loss for loss in losses if loss is not None)
        return Turn(min(starts), max(ends), time.process_time() - before, known, _peak())

    def _tell(self, command: str) -> None:
        for queue in self._commands:
            queue.put(command)

    def _collect(self) -> list[Any]:
        faulthandler.dump_traceback_later(self._timeout, exit=True)
        answers = [self._answers.get() for _ in self._commands]
        faulthandler.cancel_dump_traceback_later()
        return answers


def work(pipe: Connection, job: Job, environ: Mapping[str, str], log: str, timeout: float) -> None:
    """The whole life of the process. What it prints goes to the file ``log``."""
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(sys.stderr)
    os.environ |= environ
    import torch

    torch.set_num_threads(job.contender.threads)
    server = Server(pipe, job.contender.inside if job.contender.threaded else 1, timeout)
    threading.Thread(target=server.relay, daemon=True).start()
    try:
        import_module(f".{job.contender.module}", __package__).main(job, server.serve)
    except BaseException as error:
        root = _root(error)
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        pipe.send(Failed(f"{type(root).__name__}: {root}".splitlines()[0], text))
        os._exit(1)
    os._exit(0)


def _root(error: BaseException) -> BaseException:
    """What an error was raised from, if it was."""
    return error if error.__cause__ is None else _root(error.__cause__)


def _turn(step: Callable[[], Loss], count: int) -> tuple[float, float, Loss]:
    start = time.perf_counter()
    for _ in range(count):
        loss = step()
    return start, time.perf_counter(), loss


def _peak() -> int:
    """Peak resident memory in bytes."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _forget_peak() -> bool:
    """Give back what start and warm-up left behind, so that the peak is that of steps; whether the system can do that."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except (OSError, AttributeError):
        return False
    return True
