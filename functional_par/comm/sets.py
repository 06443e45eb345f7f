"""Which sets of ranks have a group in every world, before anything is prepared."""

from __future__ import annotations

from functional_par.mesh import AXES, DATA_AXES, Mesh


def standing_sets(mesh: Mesh) -> dict[tuple[int, ...], None]:
    """Sets of two or more ranks along each axis, along the merged data axes, and the world: once each, in one order.

    >>> list(standing_sets(Mesh(dp=2, tp=2)))
    [(0, 2), (1, 3), (0, 1), (2, 3), (0, 1, 2, 3)]
    """
    merged = [(axis,) for axis in AXES] + [DATA_AXES, AXES]
    return dict.fromkeys(ranks for axes in merged for ranks in mesh.groups(*axes) if len(ranks) > 1)
