"""Keeps what was sent alive until it has arrived, so that a sender never waits and may drop its handle."""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import Any

from torch import Tensor


class Outbox:
    """Sends under way. gloo only learns that a send has ended by waiting for it, which a thread of its own does."""

    def __init__(self, backend: str) -> None:
        self._under_way: deque[tuple[Any, Tensor]] = deque()
        self._queue: queue.SimpleQueue[tuple[Any, Tensor] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait_for_each, name="outbox", daemon=True)
        self._threaded = backend == "gloo"
        if self._threaded:
            self._thread.start()

    def add(self, work: Any, x: Tensor) -> None:
        """Keep ``x`` until ``work`` is done."""
        if self._threaded:
            self._queue.put((work, x))
            return
        self._under_way.append((work, x))
        while self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()

    def close(self) -> None:
        """Forget what has not arrived, since nobody will receive it; nothing may be added afterwards."""
        if self._threaded:
            self._queue.put(None)
            self._thread.join(1.0)
        self._under_way.clear()

    def _wait_for_each(self) -> None:
        while (sent := self._queue.get()) is not None:
            try:
                sent[0].wait()
            except RuntimeError:
                # The connection is gone. Whoever waits for this peer reports it with more to say.
                return
            del sent
