"""The rank matrix: who is where, and who is in which group."""

from __future__ import annotations

import re
from itertools import combinations, product

import pytest
import torch

from functional_par import Mesh, MeshError
from functional_par.mesh import AXES, DATA_AXES

SIZES = [s for s in product((1, 2), (1, 2, 4), (1, 3), (1, 2), (1, 2, 4)) if torch.tensor(s).prod() <= 24]


def matrix(mesh):
    return torch.arange(mesh.size).reshape(mesh.ep, mesh.pp, mesh.dp, mesh.cp, mesh.tp)


def brute_groups(mesh, axes):
    """Rows of the rank matrix with the given axes moved to the end and merged."""
    dims = [AXES.index(axis) for axis in AXES if axis in axes]
    rest = [i for i in range(5) if i not in dims]
    width = int(torch.tensor([matrix(mesh).shape[d] for d in dims]).prod()) if dims else 1
    return sorted(tuple(row) for row in matrix(mesh).permute(*rest, *dims).reshape(-1, width).tolist())


@pytest.mark.parametrize(
    "axes", [*((axis,) for axis in AXES), *combinations(AXES, 2), DATA_AXES, AXES, ()], ids="+".join
)
def test_groups_are_the_rows_of_the_rank_matrix(axes):
    for sizes in SIZES:
        mesh = Mesh(**dict(zip(AXES, sizes, strict=True)))
        expected = brute_groups(mesh, axes)
        assert list(mesh.groups(*axes)) == expected, mesh
        for rank in range(mesh.size):
            assert mesh.group(*axes, rank=rank) == next(row for row in expected if rank in row)


def test_the_order_in_which_axes_are_merged_does_not_matter():
    mesh = Mesh(ep=2, pp=2, dp=3, tp=2)
    assert mesh.groups("dp", "ep") == mesh.groups("ep", "dp")
    assert mesh.group("tp", "dp", "ep", rank=7) == mesh.group("ep", "dp", "tp", rank=7)


def test_coords_and_rank_are_inverse_and_follow_the_matrix():
    for sizes in SIZES:
        mesh = Mesh(**dict(zip(AXES, sizes, strict=True)))
        whole = matrix(mesh)
        for rank, coords in enumerate(mesh):
            assert mesh.coords(rank) == coords
            assert whole[tuple(coords)] == rank
            assert mesh.rank(**coords._asdict()) == rank


def test_axes_left_out_are_at_zero_and_of_size_one():
    mesh = Mesh(pp=2, tp=2)
    assert (mesh.ep, mesh.dp, mesh.cp, mesh.size) == (1, 1, 1, 4)
    assert mesh.rank(tp=1) == 1
    assert mesh.rank() == 0
    assert mesh.sizes == {"ep": 1, "pp": 2, "dp": 1, "cp": 1, "tp": 2}


def test_a_mesh_is_a_value():
    assert Mesh(dp=2) == Mesh(dp=2, tp=1)
    assert len({Mesh(dp=2), Mesh(dp=2), Mesh(tp=2)}) == 2
    with pytest.raises(AttributeError):
        Mesh(dp=2).dp = 3
    with pytest.raises(TypeError):
        Mesh(2, 2)


def test_it_prints_the_axes_that_are_larger_than_one():
    assert str(Mesh(dp=2, pp=4)) == "Mesh(pp=4, dp=2)"
    assert str(Mesh()) == "Mesh(dp=1)"


def test_the_table_names_every_rank_and_its_groups():
    lines = Mesh(ep=2, pp=2, dp=2, tp=1).table().splitlines()
    assert lines[0].split("  ")[0] == "rank"
    assert re.split(r"\s{2,}", lines[0]) == [
        "rank",
        "ep",
        "pp",
        "dp",
        "ep group",
        "pp group",
        "dp group",
        "ep+dp group",
    ]
    assert re.split(r"\s{2,}", lines[4]) == ["3", "0", "1", "1", "3 7", "1 3", "2 3", "2 3 6 7"]
    assert len(lines) == 9
    assert Mesh().table() == "rank  dp  dp group\n0     0   0"


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", [0, -1, 1.0, True, "2", None])
def test_a_size_that_is_not_a_positive_integer_is_refused(axis, size):
    with pytest.raises(
        MeshError, match=re.escape(f"Mesh({axis}={size!r}): the size of an axis is an integer of at least 1.")
    ):
        Mesh(**{axis: size})


def test_a_rank_outside_the_mesh_is_refused():
    for rank in (-1, 4):
        with pytest.raises(MeshError, match=rf"rank {rank} is not in Mesh\(dp=2, tp=2\): it has ranks 0 to 3\."):
            Mesh(dp=2, tp=2).coords(rank)


def test_a_coordinate_outside_its_axis_is_refused():
    for index in (-1, 2):
        with pytest.raises(MeshError, match=rf"dp={index} is outside Mesh\(dp=2\): axis dp has size 2\."):
            Mesh(dp=2).rank(dp=index)


def test_an_unknown_axis_is_refused_everywhere():
    mesh = Mesh(dp=2)
    for call in (lambda: mesh.rank(data=0), lambda: mesh.group("data", rank=0), lambda: mesh.groups("data")):
        with pytest.raises(MeshError, match="unknown axis 'data': the axes of a mesh are ep, pp, dp, cp, tp"):
            call()


def test_a_wrong_number_of_ranks_names_every_factor_and_the_fix():
    Mesh(dp=2, tp=2).check_world(4)
    message = (
        "the mesh has ep=1 * pp=1 * dp=2 * cp=1 * tp=2 = 4 ranks, but 8 are running. Start 4 processes "
        "(--nproc-per-node 4), or change the sizes so that their product is 8."
    )
    with pytest.raises(MeshError, match=re.escape(message)):
        Mesh(dp=2, tp=2).check_world(8)
    with pytest.raises(ValueError):
        Mesh(ep=2).check_world(1)
