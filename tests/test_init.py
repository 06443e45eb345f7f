"""A shard's initial values are the slice of the whole's, and depend on nothing but key and global index."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_par import init, random
from functional_par.errors import ModelError

quick = settings(deadline=None, max_examples=40)
KEY = random.key(7).fold("blocks.0.weight")
INITS = [init.normal(0.5, mean=1.0), init.uniform(-2.0, 3.0), init.constant(4.0), init.zeros(), init.ones()]


@st.composite
def windows(draw):
    shape = draw(st.lists(st.integers(1, 7), min_size=0, max_size=4))
    starts = [draw(st.integers(0, n)) for n in shape]
    local = [draw(st.integers(0, 8)) for _ in shape]
    return tuple(shape), tuple(starts), tuple(local)


@quick
@given(windows(), st.sampled_from(INITS), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_a_shard_is_the_slice_of_the_whole_bit_for_bit_and_zero_beyond_it(window, initialise, dtype):
    shape, starts, local = window
    whole = init.materialize(initialise, KEY, shape, dtype=dtype)
    shard = init.materialize(initialise, KEY, shape, starts, local, dtype=dtype)
    padded = torch.zeros([n + 8 for n in shape], dtype=dtype)
    padded[tuple(slice(0, n) for n in shape)] = whole
    assert shard.shape == local
    assert torch.equal(shard, padded[tuple(slice(s, s + n) for s, n in zip(starts, local, strict=True))])


def test_large_leaves_have_no_seam_between_chunks():
    shape = (3, 300_001)
    whole = init.materialize(init.normal(), KEY, shape)
    index = torch.arange(3 * 300_001).view(shape)
    assert torch.equal(whole, (random.normal(KEY.fold("normal").fold(0), index) * 0.02).float())
    assert torch.equal(init.materialize(init.normal(), KEY, shape, (1, 7), (2, 299_000)), whole[1:, 7:299_007])


@quick
@given(st.sampled_from(INITS), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_lower_precisions_are_float64_rounded_once(initialise, dtype):
    exact = init.materialize(initialise, KEY, (50, 3), dtype=torch.float64)
    assert torch.equal(init.materialize(initialise, KEY, (50, 3), dtype=dtype), exact.to(dtype))


def test_normal_and_uniform_have_the_mean_and_spread_asked_for():
    x = init.materialize(init.normal(0.02, mean=0.5), KEY, (300, 400), dtype=torch.float64)
    assert abs(x.mean() - 0.5) < 5 * 0.02 / 346
    assert abs(x.std() / 0.02 - 1) < 5 / 490
    u = init.materialize(init.uniform(-1.0, 3.0), KEY, (300, 400), dtype=torch.float64)
    assert -1 <= u.min() < u.max() < 3
    assert abs(u.mean() - 1) < 5 * 4 / 12**0.5 / 346


def test_other_keys_streams_and_distributions_give_other_numbers():
    def own(draw):
        return torch.stack([draw.normal(), draw.normal(stream=1), draw.uniform(), draw.uniform(stream=1)]).sum(0)

    draw = init.Draw(KEY, (1000,), (0,), (1000,), torch.float64, torch.device("cpu"))
    other = init.Draw(KEY.fold(0), (1000,), (0,), (1000,), torch.float64, torch.device("cpu"))
    streams = [draw.normal(), draw.normal(stream=1), draw.uniform(), draw.uniform(stream=1), other.normal()]
    correlations = torch.corrcoef(torch.stack(streams)) - torch.eye(5, dtype=torch.float64)
    assert correlations.abs().max() < 5 / 1000**0.5
    assert torch.equal(init.materialize(own, KEY, (1000,), dtype=torch.float64), torch.stack(streams[:4]).sum(0))


def test_a_draw_knows_the_global_shape_and_fan_in():
    seen = []

    def own(draw):
        seen.append((draw.shape, draw.local_shape, draw.fan_in))
        return draw.normal(draw.fan_in**-0.5)

    init.materialize(own, KEY, (6, 16), (3, 0), (3, 16))
    init.materialize(own, KEY, ())
    assert seen == [((6, 16), (3, 16), 16), ((), (), 1)]


def test_the_meta_device_gets_shapes_without_numbers():
    for initialise in INITS:
        value = init.materialize(initialise, KEY, (5, 3), (3, 0), (3, 3), torch.bfloat16, "meta")
        assert (value.device.type, value.dtype, value.shape) == ("meta", torch.bfloat16, (3, 3))


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    for initialise in INITS:
        init.materialize(initialise, KEY, (5, 3))
    assert torch.equal(torch.get_rng_state(), before)


def test_initialisers_are_values_that_compare_equal():
    assert init.normal(0.1) == init.normal(0.1) != init.normal(0.2)
    assert init.zeros() == init.constant(0.0)
    assert len({init.uniform(0, 1), init.uniform(0, 1), init.ones()}) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: init.normal(-1.0), r"init\.normal\(std=-1\.0, mean=0\.0\): both are finite, and std is at least 0"),
        (lambda: init.normal(float("nan")), r"init\.normal\(std=nan"),
        (lambda: init.uniform(2.0, 1.0), r"init\.uniform\(low=2\.0, high=1\.0\): both are finite, and low is at most"),
        (
            lambda: init.materialize(lambda draw: torch.zeros(4), KEY, (4,), (2,), (2,)),
            r"returned \(4,\).* where \(2,\)",
        ),
    ],
)
def test_bad_initialisers_are_errors_that_name_the_numbers(make, message):
    with pytest.raises(ModelError, match=message):
        make()
