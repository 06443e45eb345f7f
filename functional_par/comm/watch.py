"""A thread beside each process that ends it when another rank has failed, when the ranks wait for each other, or at
Ctrl-C, even inside a blocked call."""

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

from functional_par.comm.standing import Standing, trouble
from functional_par.errors import ParallelError

POLL = 0.2
"""Seconds between two looks at the store."""

GRACE = 1.0
"""Seconds that a rank gets to end by itself, or to go on, before anything is concluded."""

INTERRUPTED = 130
"""Exit code of a process that Ctrl-C ended."""

QUIET = "interrupted"
GONE = "the process that holds the store is gone"


class _Patience:
    """How long a rank has waited, and whether the others will ever let it go on."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._size, self._own = store, size, f"standing/{rank}"
        self._rank, self._since = rank, time.monotonic()
        self._last: Standing | None = None
        self._told = False
        self._seen: list[str | None] = []

    def exhausted(self, standing: Standing | None) -> str | None:
        """Why not, once the same was seen at two looks that are ``GRACE`` apart."""
        if standing is None or standing != self._last:
            self._last, self._since, self._seen = standing, time.monotonic(), []
            if self._told:
                self._store.delete_key(self._own)
                self._told = False
        elif time.monotonic() - self._since > GRACE:
            self._since = time.monotonic()
            return self._compare(standing)
        return None

    def _compare(self, standing: Standing) -> str | None:
        if not self._told:
            self._store.set(self._own, standing.dumps())
            self._told = True
        keys = [f"standing/{rank}" for rank in range(self._size)]
        before, self._seen = self._seen, [self._read(key) for key in keys]
        if before != self._seen:
            return None
        return trouble({rank: Standing.loads(text) for rank, text in enumerate(before) if text}, self._size)

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None


class Watch:
    """One rank's look-out. The ranks tell each other through a store (its own connection: calls to one block).

    Args:
        store: a ``torch.distributed`` store that all ranks share.
        rank: this rank.
        size: the number of ranks.
        state: says for people where this rank is.
        standing: what this rank waits for, or None.
    """

    def __init__(
        self, store: Any, rank: int, size: int, state: Callable[[], str], standing: Callable[[], Standing | None]
    ) -> None:
        self._store, self._rank, self._size, self._state, self._standing = store, rank, size, state, standing
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
            return self._report(QUIET if interrupted else text)
        except RuntimeError:
            return QUIET if interrupted else GONE

    def refused(self, error: ParallelError) -> bool:
        """Tell all ranks that ``error`` came before any communication; True if all of them say the same."""
        self.stop()
        keys = [f"refused/{rank}" for rank in range(self._size)]
        try:
            self._store.set(keys[self._rank], str(error))
            return _within(3.0, lambda: self._store.check(keys)) and all(
                self._store.get(key).decode() == str(error) for key in keys
            )
        except RuntimeError:
            return False

    def finish(self, standing: Standing) -> None:
        """Return when every rank has finished."""
        try:
            self._store.set(f"standing/{self._rank}", standing.dumps())
            self._store.add("finished", 1)
            _within(float("inf"), lambda: self._store.add("finished", 0) == self._size)
        except RuntimeError:
            # The process that held the store has finished too.
            pass
        self.stop()

    def _report(self, text: str) -> str:
        if self._store.add("failures", 1) > 1:
            return self._store.get("failed").decode()
        self._store.set("failed", text)
        return ""

    @staticmethod
    def _listen(descriptor: int) -> int:
        """Let signals write to ``descriptor``; the one before. Python allows it in the main thread alone."""
        if threading.current_thread() is not threading.main_thread():
            return -1
        return signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)

    def _watch(self) -> None:
        patience = _Patience(self._store, self._rank, self._size)
        with self._signal:
            while not self._stopped.is_set():
                try:
                    self._look(patience)
                except RuntimeError:
                    if not self._stopped.wait(GRACE):
                        leave(self._rank, GONE, self._state())

    def _look(self, patience: _Patience) -> None:
        readable, _, _ = select.select([self._signal], [], [], POLL)
        if readable and signal.SIGINT in self._signal.recv(64):
            # The main thread sees the signal too, unless it is blocked outside of Python.
            if not self._stopped.wait(GRACE):
                end("", INTERRUPTED)
        elif self._store.check(["failed"]):
            leave(self._rank, self._store.get("failed").decode(), self._state())
        elif (why := patience.exhausted(self._standing())) is not None:
            first, *_ = why.splitlines()
            if not self._report(f"rank {self._rank} found this: {first}"):
                end(why + "\n", 1)


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


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline, pause = time.monotonic() + seconds, 0.005
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, POLL)
    return True
