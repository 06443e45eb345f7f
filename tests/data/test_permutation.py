"""The keyed order is a bijection of any size that can be asked for any place."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_par import random
from functional_par.data.permutation import permute, shuffled

quick = settings(deadline=None, max_examples=50)


@quick
@given(st.integers(0, 2**64), st.integers(1, 3000))
def test_every_place_is_taken_once(seed, n):
    assert sorted(permute(random.key(seed), torch.arange(n), n).tolist()) == list(range(n))


@quick
@given(st.integers(0, 100), st.integers(1, 2**60), st.data())
def test_huge_orders_need_no_table_and_stay_in_range(seed, n, data):
    index = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True))
    places = permute(random.key(seed), torch.tensor(index), n)
    assert len(set(places.tolist())) == len(index)
    assert 0 <= places.min() <= places.max() < n
    assert places[:1].tolist() == permute(random.key(seed), torch.tensor(index[:1]), n).tolist()


def test_all_orders_of_four_things_are_about_equally_likely():
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(2400):
        order = tuple(permute(random.key(seed), torch.arange(4), 4).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    chi2 = sum((count - 100) ** 2 / 100 for count in counts.values())
    assert chi2 < 23 + 5 * 46**0.5


def test_neighbours_are_scattered():
    places = permute(random.key(0), torch.arange(10_000), 10_000).double()
    correlation = torch.corrcoef(torch.stack([places[:-1], places[1:]]))[0, 1].item()
    assert abs(correlation) < 5 / 10_000**0.5


@pytest.mark.parametrize("n", [1, 2, 7, 64])
def test_each_epoch_reads_every_window_once_in_an_order_of_its_own(n):
    orders = shuffled(3, torch.arange(4 * n), n).view(4, n)
    assert torch.equal(orders.sort(dim=1).values, torch.arange(n).expand(4, n))
    if n > 2:
        assert len({tuple(order.tolist()) for order in orders}) == 4
