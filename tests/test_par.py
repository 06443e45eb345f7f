"""What a layer may ask of ``par`` at run time."""

import pytest
import torch

import functional_par as fp
from functional_par.run_par import RunPar


def test_a_collective_without_an_axis_is_refused():
    with pytest.raises(fp.MeshError, match=r"names at least one axis, as par\.psum\(x, \"tp\"\) does"):
        RunPar().psum(torch.ones(2))


def test_a_sum_over_merged_axes_that_nobody_prepared_is_refused_by_their_names():
    def main(world):
        par = RunPar({(axis,): world.group(axis) for axis in ("dp", "tp")})
        par.psum(torch.ones(2), "dp", "tp")

    with pytest.raises(fp.MeshError, match=r"no group along dp\+tp was prepared for this program"):
        fp.run(main, fp.Mesh(dp=2, tp=2))
