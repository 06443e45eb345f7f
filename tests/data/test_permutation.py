"""The keyed order is a bijection of any size that can be asked for any place."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_par import random
from functional_par.data.permutation import permute, shuffled

quick = settings(deadline=None, max_examples=50)


@quick
@given(st.integers(0, 2**64), st.integers(1, 1000))
def test_every_place_is_taken_once(seed, n):
    assert sorted(permute(random.key(seed), i, n) for i in range(n)) == list(range(n))


@quick
@given(st.integers(0, 100), st.integers(1, 2**60), st.data())
def test_huge_orders_need_no_table_and_stay_in_range(seed, n, data):
    indices = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True))
    places = [permute(random.key(seed), i, n) for i in indices]
    assert len(set(places)) == len(indices)
    assert all(0 <= place < n for place in places)


def test_all_orders_of_four_things_are_about_equally_likely():
    counts = Counter(tuple(permute(random.key(seed), i, 4) for i in range(4)) for seed in range(2400))
    assert len(counts) == 24
    chi2 = sum((count - 100) ** 2 / 100 for count in counts.values())
    assert chi2 < 23 + 5 * 46**0.5


def test_neighbours_are_scattered():
    places = torch.tensor([permute(random.key(0), i, 10_000) for i in range(10_000)], dtype=torch.float64)
    correlation = torch.corrcoef(torch.stack([places[:-1], places[1:]]))[0, 1].item()
    assert abs(correlation) < 5 / 10_000**0.5


@pytest.mark.parametrize("n", [1, 2, 7, 64])
def test_each_epoch_reads_every_window_once_in_an_order_of_its_own(n):
    orders = [tuple(shuffled(3, range(epoch * n, (epoch + 1) * n), n)) for epoch in range(4)]
    assert all(sorted(order) == list(range(n)) for order in orders)
    assert sum(orders, ()) == tuple(shuffled(3, range(4 * n), n))
    assert n <= 2 or len(set(orders)) == 4


def test_no_samples_read_no_windows():
    assert shuffled(0, range(5, 5), 3) == []
