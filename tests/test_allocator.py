"""Freed memory that stays with the process."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
import functional_par as fp
from functional_par.allocator import keep_freed_memory

def faults():
    for i in range(9):
        torch.ones(20_000_000)
        if i == 3:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

fp.run(lambda world: None, fp.Mesh(), keep_memory=sys.argv[1] == "keep")
print(faults(), keep_freed_memory())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="settings of glibc's allocator")
def test_freed_memory_is_used_again():
    found = {}
    for how in ("keep", "return"):
        done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
        faults, taken = done.stdout.split()
        found[how] = int(faults)
    if taken == "True":  # not with another allocator than glibc's
        assert found["keep"] < 100 < 3000 < found["return"]
