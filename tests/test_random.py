"""Random numbers are a pure function of (key, index)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_par import random

quick = settings(deadline=None, max_examples=25)
COUNT = 400_000
SEEDS = st.integers(-(2**70), 2**70)


def test_the_same_seed_and_path_give_the_same_numbers_for_ever():
    index = torch.tensor([0, 1, 2**40])
    leaf = random.key(0).fold("blocks.0.weight")
    assert random.bits(leaf, index).tolist() == [6506941680825395600, -8827278869400370373, 6073371684829782763]
    assert random.normal(leaf, index).tolist() == [-2.100680250318598, 0.00885797683400633, 0.7952635863888144]


@quick
@given(seed=SEEDS, index=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=50))
def test_a_number_does_not_depend_on_its_neighbours(seed, index):
    key = random.key(seed)
    many = torch.tensor(index)
    for function in (random.bits, random.uniform, random.normal):
        whole = function(key, many)
        assert whole.tolist() == [function(key, torch.tensor(i)).item() for i in index]
        assert torch.equal(function(key, many.flip(0)), whole.flip(0))
    assert random.bits(key, many).tolist() == [random.bits_at(key, i) for i in index]


def test_chunks_leave_no_seam_and_shapes_are_kept():
    index = torch.arange(3 * 40_000).view(3, 40_000)
    for function in (random.bits, random.uniform, random.normal):
        whole = function(random.key(5), index)
        assert whole.shape == index.shape
        assert torch.equal(whole.t()[32_760:32_780], function(random.key(5), index.t()[32_760:32_780]))
        assert torch.equal(whole[1, 123:], function(random.key(5), index[1, 123:]))


@quick
@given(
    st.lists(
        st.tuples(SEEDS, st.lists(st.one_of(st.integers(), st.text(max_size=3)), max_size=3)),
        unique_by=repr,
        max_size=10,
    )
)
def test_different_seeds_and_folds_give_different_keys(routes):
    keys = []
    for seed, folds in routes:
        key = random.key(seed)
        for data in folds:
            key = key.fold(data)
        keys.append(key)
    assert len(set(keys)) == len(keys)


def test_each_bit_is_a_fair_coin_and_flips_half_the_time_with_index_and_key():
    index = torch.arange(COUNT)
    here = random.bits(random.key(1), index)
    following, other_key = random.bits(random.key(1), index + 1), random.bits(random.key(2), index)
    for what in (here, here ^ following, here ^ other_key):
        for bit in range(64):
            share = ((what >> bit) & 1).double().mean().item()
            assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(COUNT)


def test_uniform_numbers_fill_the_unit_interval_evenly():
    u = random.uniform(random.key(3), torch.arange(COUNT))
    assert u.dtype == torch.float64
    assert 0 <= u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1
    counts = torch.histc(u, bins=100, min=0, max=1)
    chi2 = ((counts - COUNT / 100) ** 2 / (COUNT / 100)).sum().item()
    assert chi2 < 99 + 5 * math.sqrt(2 * 99)


def test_normal_numbers_have_the_moments_and_the_tails_of_the_normal_distribution():
    x = random.normal(random.key(4), torch.arange(COUNT))
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**power).mean().item() - moment) < 5 * math.sqrt(variance / COUNT)
    for bound in (0.5, 1.0, 2.0, 3.0):
        share = math.erfc(bound / math.sqrt(2))
        assert abs((x.abs() > bound).double().mean().item() - share) < 5 * math.sqrt(share / COUNT)


def test_normal_numbers_of_neighbours_and_of_other_keys_are_uncorrelated():
    index = torch.arange(COUNT)
    x = random.normal(random.key(4), index)
    for y in (random.normal(random.key(4), index + 1), random.normal(random.key(4).fold(0), index)):
        assert abs((x * y).mean().item()) < 5 / math.sqrt(COUNT)
        assert abs((x.square() * y.square()).mean().item() - 1) < 5 * math.sqrt(8 / COUNT)


@quick
@given(st.lists(st.floats(2.0**-53, 1.0), min_size=1, max_size=40))
def test_logarithm_and_sine_are_accurate_to_a_few_units_in_the_last_place(values):
    x = torch.tensor(values, dtype=torch.float64)
    torch.testing.assert_close(random._log(x), x.log(), rtol=1e-15, atol=1e-300)
    angle = (x - 0.5) * math.pi
    torch.testing.assert_close(random._sin(angle), angle.sin(), rtol=1e-14, atol=1e-300)


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    for function in (random.bits, random.uniform, random.normal):
        function(random.key(0), torch.arange(10))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_index_that_is_not_int64_is_refused():
    with pytest.raises(TypeError, match=r"an index of random numbers is an int64 tensor, not torch\.float32"):
        random.uniform(random.key(0), torch.zeros(3))
