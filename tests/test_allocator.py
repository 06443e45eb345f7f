"""Freed memory that stays with the process."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
import functional_par as fp
from functional_par.allocator import keep_freed_memory

def faults(world):
    for i in range(9):
        torch.ones(20_000_000)
        if i == 3:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = fp.run(faults, fp.Mesh())[0]
print(first, fp.run(faults, fp.Mesh(), keep_memory=True)[0], keep_freed_memory())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="settings of glibc's allocator")
def test_freed_memory_is_used_again():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    before, after, taken = done.stdout.split()
    if taken == "True":  # not with another allocator than glibc's
        assert int(after) < 100 < 3000 < int(before)
