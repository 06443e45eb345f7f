"""A value that is cut, copied or summed over pieces and ranks is found to be so, and nothing else is."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_par.audit.layout import Layout, close, distance, find, join

LIES = ["same", 0, 1, "sum"]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spread(x, lie, n, seed):
    """The parts of a value on n ranks."""
    if lie == "same":
        return [x.clone() for _ in range(n)]
    if lie == "sum":
        others = [normal(*x.shape, seed=seed + i) for i in range(n - 1)]
        return [*others, x - sum(others)] if others else [x]
    return list(x.chunk(n, lie))


@given(st.sampled_from(LIES), st.sampled_from(LIES), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]))
def test_a_layout_is_found(rows, tp, n_rows, n_tp):
    whole = normal(12, 12)
    grid = [spread(piece, tp, n_tp, 7 * p) for p, piece in enumerate(spread(whole, rows, n_rows, 90))]
    layout = find(whole, grid)
    assert layout == Layout(rows if n_rows > 1 else "same", tp if n_tp > 1 else "same")
    assert close(join(grid, layout, whole.shape), whole, grid)
    for scale in (1 + 1e-6, 0.7, -1.0):
        assert find(whole, [[part * scale for part in parts] for parts in grid]) is None


@given(st.sampled_from([3, 5, 7, 9]), st.sampled_from([2, 4]))
def test_padding_is_counted_and_left_out(size, n):
    whole = normal(2, size)
    local = -(-size // n)
    padded = torch.full((2, local * n), 9.0, dtype=torch.float64)
    padded[:, :size] = whole
    assert find(whole, [list(padded.chunk(n, 1))]) == Layout("same", 1, local * n - size)


def test_maxima_counts_and_masks_are_parts_too():
    parts = [normal(4, seed=i) for i in range(3)]
    assert find(torch.stack(parts).amax(0), [parts]).tp == "max"
    assert find(torch.tensor(7), [[torch.tensor(3)], [torch.tensor(4)]]).rows == "sum"
    mask = torch.tensor([True, True, False])
    first, second = torch.tensor([True, False, False]), torch.tensor([False, True, False])
    assert find(mask, [[first, second]]).tp in ("sum", "max")


def test_a_given_lie_is_looked_for_alone():
    whole = torch.ones(2, 2, dtype=torch.float64)
    grid = [[whole / 2, whole / 2]]
    assert find(whole, grid, tp="same") is None
    assert find(whole, grid, tp="sum") == Layout("same", "sum")
    assert str(find(whole, grid)) == "rows: the same, tp: terms of a sum"
    assert str(Layout(0, "max")) == "rows: cut in dim 0, tp: terms of a maximum"


def test_infinities_and_shapes_are_compared():
    x = torch.tensor([1.0, -torch.inf], dtype=torch.float64)
    assert close(x, x.clone())
    assert distance(x, torch.tensor([1.0, 0.0], dtype=torch.float64)) == torch.inf
    assert distance(torch.tensor([torch.nan]), torch.tensor([1.0])) == torch.inf
    assert distance(x, x[:1]) == torch.inf
    assert not close(x, x[:1])
    z = torch.complex(normal(3), normal(3, seed=1))
    assert find(z, [[z, z]]) == Layout("same", "same")
    assert find(z, [list(torch.cat([z, z[:1]]).chunk(2))]) == Layout("same", 0, 1)
