"""Memory that stays with the process: of glibc's allocator, under which torch's CPU tensors lie."""

from __future__ import annotations

import ctypes
import sys

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> bool:
    """Let freed memory be used again rather than returned to the system, by all threads of this process, from now on.

    A large tensor is otherwise mapped anew each time, and the system clears every page of it. At its peak a process needs a
    few percent more, and it stays at its peak. To be called before threads are made: one that has an arena of its own, as a
    few may already at import, gets tensors of more than 64 MB from the system all the same.

    Returns:
        Whether the allocator took it: False where it is not glibc's.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_ARENA_MAX, 1))
    taken = [mallopt(what, value) for what, value in settings]  # musl's mallopt, for one, takes none
    return all(taken)
