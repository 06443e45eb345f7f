"""A thread beside each process that ends it when another rank has failed, or at Ctrl-C, even inside a blocked call."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from functional_par.errors import ParallelError

POLL = 0.2
"""Seconds between two looks at the store."""

GRACE = 1.0
"""Seconds that a rank gets to end by itself."""

INTERRUPTED = 130
"""Exit code of a process that Ctrl-C ended."""

QUIET = "interrupted"
GONE = "the process that holds the store is gone"


class Watch:
    """One rank's look-out. The ranks tell each other through a store (its own connection: calls to one block).

    Args:
        store: a ``torch.distributed`` store that all ranks share.
        rank: this rank.
        size: the number of ranks.
        state: says for people where this rank is.
    """

    def __init__(self, store: Any, rank: int, size: int, state: Callable[[], str]) -> None:
        self._store, self._rank, self._size, self._state = store, rank, size, state
        self._stopped = threading.Event()
        self._signal, self._tell = socket.socketpair()
        self._tell.setblocking(False)
        self._before = self._listen(self._tell.fileno())
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the look-out."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._listen(self._before)
            self._tell.close()
            self._thread.join()

    def fail(self, error: BaseException) -> str:
        """Tell all ranks that this one fails with ``error``. The failure that came before it, or ``""``."""
        self.stop()
        interrupted = isinstance(error, KeyboardInterrupt)
        text = f"rank {self._rank} failed: {type(error).__name__}: {error}\n  ({self._state()})"
        try:
            if self._store.add("failures", 1) > 1:
                return self._store.get("failed").decode()
            self._store.set("failed", QUIET if interrupted else text)
        except RuntimeError:
            return QUIET if interrupted else GONE
        return ""

    def refused(self, error: ParallelError) -> bool:
        """Tell all ranks that ``error`` came before any communication; True if all of them say the same."""
        self.stop()
        try:
            self._store.set(f"refused/{self._rank}", str(error))
            keys = [f"refused/{rank}" for rank in range(self._size)]
            return self._within(3.0, lambda: self._store.check(keys)) and all(
                self._store.get(key).decode() == str(error) for key in keys
            )
        except RuntimeError:
            return False

    def finish(self) -> None:
        """Return when every rank has finished."""
        try:
            self._store.add("finished", 1)
            self._within(float("inf"), lambda: self._store.add("finished", 0) == self._size)
        except RuntimeError:
            # The process that held the store has finished too.
            pass
        self.stop()

    @staticmethod
    def _within(seconds: float, condition: Callable[[], bool]) -> bool:
        deadline, pause = time.monotonic() + seconds, 0.005
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, POLL)
        return True

    @staticmethod
    def _listen(descriptor: int) -> int:
        """Let signals write to ``descriptor``; the one before. Python allows it in the main thread alone."""
        if threading.current_thread() is not threading.main_thread():
            return -1
        return signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)

    def _watch(self) -> None:
        with self._signal:
            while not self._stopped.is_set():
                readable, _, _ = select.select([self._signal], [], [], POLL)
                if readable and signal.SIGINT in self._signal.recv(64):
                    # The main thread sees the signal too, unless it is blocked outside of Python.
                    if not self._stopped.wait(GRACE):
                        end("", INTERRUPTED)
                elif failed := self._failed():
                    leave(self._rank, failed, self._state())

    def _failed(self) -> str:
        try:
            return self._store.get("failed").decode() if self._store.check(["failed"]) else ""
        except RuntimeError:
            return GONE


def leave(rank: int, failed: str, state: str) -> NoReturn:
    """Leave this process because another failed, saying so and where this one was."""
    if failed == QUIET:
        end("", INTERRUPTED)
    end(f"rank {rank} stops because {failed}\n  ({state})\n", 1)


def end(text: str, code: int) -> NoReturn:
    """Leave this process at once; nothing that is blocked can hold it."""
    sys.stdout.flush()
    sys.stderr.write(text)
    sys.stderr.flush()
    os._exit(code)
