"""What is checked before any rank exists."""

import pytest

from functional_par.errors import MeshError
from functional_par.mesh import Mesh
from functional_par.report.prepare import check_threads
from functional_par.run import MOST_THREADS


def test_more_ranks_than_threads_are_refused_with_the_fix():
    message = r"^Mesh\(dp=257\) has 257 ranks, .* at most 256 are started\. Start 257 processes \(torchrun"
    with pytest.raises(MeshError, match=message):
        check_threads(Mesh(dp=MOST_THREADS + 1), "threads")


@pytest.mark.parametrize(("size", "backend"), [(MOST_THREADS, "threads"), (2000, "gloo"), (2000, "nccl")])
def test_what_can_run_passes(size, backend):
    check_threads(Mesh(dp=size), backend)
