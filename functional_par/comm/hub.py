"""Where ranks that are threads wait for each other, and where it is noticed that a wait can never end.

The hub knows no tensors: only gates, who waits at which, who has finished and who failed first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from functional_par.comm.base import Record
from functional_par.comm.checks import named
from functional_par.errors import DeadlockError, RankFailedError


@dataclass(frozen=True)
class Failure:
    """The first error of a run; ``rank`` is None when it came from outside, as Ctrl-C does."""

    rank: int | None
    error: BaseException

    def for_rank(self, rank: int, doing: object = "", waited: str = "") -> BaseException:
        """What another rank raises because of it; ``doing`` and ``waited`` say what that rank was at, and waiting for."""
        if isinstance(self.error, DeadlockError):
            return DeadlockError(str(self.error))
        if self.rank is None:
            return RankFailedError(f"rank {rank} stopped because the run was interrupted")
        error = f"{type(self.error).__name__}: {self.error}"
        was = [f"was waiting for {waited}" if waited else "", f"was at {doing}" if doing else ""]
        own = f" (it {' and '.join(filter(None, was))})" if any(was) else ""
        return RankFailedError(f"rank {rank} stopped because rank {self.rank} failed: {error}{own}")


class Gate:
    """Opens once, for all. ``missing`` holds the ranks that have yet to do their part."""

    __slots__ = ("is_open", "missing", "waiting")

    def __init__(self, missing: Iterable[int] = ()) -> None:
        self.missing = set(missing)
        self.is_open = False
        self.waiting: list[int] = []


@dataclass(frozen=True)
class _Wait:
    """A rank that sleeps until its bell is released."""

    gate: Gate
    what: object
    bell: threading.Lock


class Hub:
    """The meeting point of ``size`` ranks.

    Attributes:
        lock: guards the hub's state and that of the meetings held at it.
        records: each rank's record, for the report of a deadlock.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self.lock = threading.Lock()
        self.records = [Record() for _ in range(size)]
        self._timeout = timeout
        self._finished: set[int] = set()
        self._waiting: dict[int, _Wait] = {}
        self._failure: Failure | None = None
        self._over = threading.Event()

    @property
    def failure(self) -> Failure | None:
        """The first failure, if any."""
        return self._failure

    def check(self, rank: int) -> None:
        """Raise what stops ``rank``, if another rank has failed."""
        if self._failure is not None:
            raise self._failure.for_rank(rank, self.records[rank].doing)

    def open(self, gate: Gate) -> None:
        """Let everyone through. Called by the one who completes what the gate stands for."""
        with self.lock:
            gate.is_open = True
            for rank in gate.waiting:
                if (wait := self._waiting.pop(rank, None)) is not None:
                    wait.bell.release()

    def wait(self, rank: int, gate: Gate, what: object) -> None:
        """Return once the gate is open; ``what`` says by its ``str`` what is waited for.

        Raises:
            DeadlockError: if it can never open, or did not within the timeout.
            RankFailedError: if another rank has failed.
        """
        if not gate.is_open:
            bell = threading.Lock()
            bell.acquire()
            with self.lock:
                if gate.is_open or self._failure is not None:
                    bell.release()
                else:
                    gate.waiting.append(rank)
                    self._waiting[rank] = _Wait(gate, what, bell)
                    self._detect(rank)
            if not bell.acquire(timeout=self._timeout):
                with self.lock:
                    self._deadlock(rank, f"after {self._timeout:g} s without progress")
            if self._failure is not None:
                waited = f"{named(gate.missing)} in {what}" if gate.missing else ""
                raise self._failure.for_rank(rank, self.records[rank].doing, waited)

    def finish(self, rank: int) -> None:
        """Note that ``rank`` has returned from its main function."""
        with self.lock:
            self._finished.add(rank)
            self._detect(rank)
            if len(self._finished) == len(self.records):
                self._over.set()

    def fail(self, rank: int | None, error: BaseException) -> None:
        """Stop every rank because of ``error``; only the first failure counts."""
        with self.lock:
            if isinstance(error, DeadlockError) and self._failure is not None and not self._failure.error.__traceback__:
                # A deadlock is noticed by whoever moved last; a rank that was stuck in it shows where.
                self._failure = Failure(rank, error)
            self._fail(rank, error)

    def wait_until_over(self) -> None:
        """Return when every rank has finished, or one has failed."""
        # In short waits, so that Ctrl-C is seen whichever thread the system delivers the signal to.
        while not self._over.wait(0.1):
            pass

    def _fail(self, rank: int | None, error: BaseException) -> None:
        if self._failure is None:
            self._failure = Failure(rank, error)
            for wait in self._waiting.values():
                wait.bell.release()
            self._waiting.clear()
            self._over.set()

    def _detect(self, rank: int) -> None:
        stuck = any(wait.gate.missing & self._finished for wait in self._waiting.values())
        if self._waiting and (stuck or len(self._waiting) + len(self._finished) == len(self.records)):
            self._deadlock(rank, "and cannot go on")

    def _deadlock(self, rank: int, why: str) -> None:
        lines = "\n".join(f"  rank {r}: {self._state(r)}" for r in range(len(self.records)))
        self._fail(rank, DeadlockError(f"ranks wait for each other {why}.\n{lines}"))

    def _state(self, rank: int) -> str:
        last = f"last call: {self.records[rank].last}"
        if rank in self._finished:
            return f"has finished; {last}"
        if rank not in self._waiting:
            return f"is computing; {last}"
        wait = self._waiting[rank]
        return f"waits for {named(wait.gate.missing)} in {wait.what}; {last}"
