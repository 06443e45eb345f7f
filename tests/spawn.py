"""Ranks as forks of one process that has imported everything, in the environment that torchrun makes: eight processes that
each import torch take half a minute."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

import torch.distributed as dist


def spawn(size: int, main: Callable[[], object]) -> int:
    """Run ``main`` in ``size`` processes; 0 if all of them return, else the exit code of one that does not."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    sys.stdout.flush()
    for rank in range(size):
        if not os.fork():
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            os._exit(_code(main))
    return max(os.waitstatus_to_exitcode(os.wait()[1]) % 256 for _ in range(size))


def _code(main: Callable[[], object]) -> int:
    try:
        main()
        return 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
