"""How a script ends: what the user can mend is one message and exit code 2, Ctrl-C is 130, a defect a traceback and 1.

Of many processes with one complaint, one speaks.
"""

from __future__ import annotations

import errno
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from functional_par.errors import CommError, ParallelError, RankFailedError, StateError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MENDABLE, INTERRUPTED, DEFECT = 2, 130, 1
PATIENCE = 5.0
"""Seconds that other processes leave to the first to say what is wrong; torchrun ends them as soon as it has."""


def is_first_process() -> bool:
    """True in the process that speaks for all: rank 0 of torchrun's, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def exit_code(main: Callable[[], Any]) -> int:
    """Run ``main`` and turn how it ends into an exit code, with the message that goes with it on stderr."""
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        _say("interrupted")
        return _leave(INTERRUPTED)
    except BrokenPipeError:
        _drop_output()  # whoever read it has enough
        return DEFECT
    except RankFailedError as error:
        _say(str(error))
        return _leave(DEFECT)
    except (CommError, StateError):
        traceback.print_exc()
        return _leave(DEFECT)
    except ParallelError as error:
        _say(f"error: {error}")
        return _leave(MENDABLE)
    except Exception as error:
        if (message := _exhausted(error)) is None:
            traceback.print_exc()
            return _leave(DEFECT)
        _say(f"error: {message}")
        return _leave(MENDABLE)
    return 0


def _exhausted(error: Exception) -> str | None:
    """What to say when the machine, not the program, is at its end: memory, or the disk that output goes to."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        return (
            f"out of memory: {text[:300] or 'no more is left'}. Take a smaller model, sequence or microbatch "
            "(more microbatches make smaller ones), or more ranks on more machines."
        )
    if isinstance(error, OSError) and error.errno in FULL:
        _drop_output()
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}. Make room for the output."
    return None


def _drop_output() -> None:
    """Python would complain about what it could not print once more when it flushes at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(message: str) -> None:
    # Before ranks are connected, all find the same mistake; after, ``fp.run`` lets one error out.
    if not is_first_process() and not (dist.is_available() and dist.is_initialized()):
        time.sleep(PATIENCE)
        message = f"rank {os.environ['RANK']}: {message}"
    print(message, file=sys.stderr, flush=True)


def _leave(code: int) -> int:
    """The exit code; a process among many leaves at once, since its communication threads may keep it for minutes."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
