"""SGD steps as torch.optim.SGD does, purely or in place, with the same bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_par import optim
from functional_par.errors import ConfigError


def leaves(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {p: torch.randn(s, dtype=dtype, generator=generator) for p, s in {"w": (7, 5), "b": (5,), "e": (0,)}.items()}


@settings(deadline=None, max_examples=15)
@given(
    st.floats(1e-4, 1.0), st.sampled_from([0.0, 0.5, 0.9]), st.booleans(), st.sampled_from([0.0, 0.1]), st.booleans()
)
def test_twenty_steps_equal_torch_sgd(lr, momentum, nesterov, weight_decay, inplace):
    nesterov = nesterov and momentum > 0
    optimizer = optim.sgd(lr, momentum, nesterov, weight_decay)
    params = leaves(0)
    theirs = {path: torch.nn.Parameter(leaf.clone()) for path, leaf in params.items()}
    reference = torch.optim.SGD(theirs.values(), lr, momentum, weight_decay=weight_decay, nesterov=nesterov)
    slots = optimizer.init(params)
    for step in range(20):
        grads = leaves(step + 1)
        for path, leaf in theirs.items():
            leaf.grad = grads[path].clone()
        reference.step()
        params, slots = optimizer.update(grads, slots, params, step, inplace=inplace)
    for path, leaf in theirs.items():
        torch.testing.assert_close(params[path], leaf.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_in_place_and_pure_updates_have_the_same_bits_and_the_pure_one_leaves_its_arguments_alone(dtype, momentum):
    optimizer = optim.sgd(0.1, momentum, weight_decay=0.1)
    params, grads = leaves(0, dtype), leaves(1, torch.float32)
    slots = optimizer.init(params)
    new, new_slots = optimizer.update(grads, slots, params, 0, inplace=False)
    assert all(torch.equal(leaf, leaves(0, dtype)[path]) for path, leaf in params.items())
    assert all(not leaf.any() for slot in slots.values() for leaf in slot.values())
    memory = params["w"].data_ptr()
    own, own_slots = optimizer.update(grads, slots, params, 0, inplace=True)
    assert own["w"].data_ptr() == memory
    assert all(torch.equal(own[path], new[path]) for path in new)
    assert all(torch.equal(own_slots[name][path], new_slots[name][path]) for name in new_slots for path in new)
    assert all(torch.equal(grads[path], leaves(1, torch.float32)[path]) for path in grads)


def test_a_slice_of_a_leaf_gets_the_same_bits_as_the_whole():
    optimizer = optim.sgd(0.1, 0.9, nesterov=True, weight_decay=0.1)
    params, grads = leaves(0, torch.float32), leaves(1, torch.float32)
    whole, _ = optimizer.update(grads, optimizer.init(params), params, 0, inplace=False)
    part = {"w": params["w"][1:4, 2:]}
    sliced, _ = optimizer.update({"w": grads["w"][1:4, 2:]}, optimizer.init(part), part, 0, inplace=False)
    assert torch.equal(sliced["w"], whole["w"][1:4, 2:])


def test_without_momentum_there_is_no_state():
    assert optim.sgd(0.1).init(leaves(0)) == {}
    assert optim.sgd(0.1).slots == ()
    assert optim.sgd(0.1, 0.9).slots == ("momentum",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, r"sgd\(lr\) = -1\.0"),
        ({"lr": 0.1, "momentum": 1.5}, r"sgd\(momentum\) = 1\.5"),
        ({"lr": 0.1, "weight_decay": -1}, r"sgd\(weight_decay\) = -1"),
        ({"lr": 0.1, "nesterov": True}, r"sgd\(nesterov=True\) with momentum = 0\.0"),
    ],
)
def test_numbers_out_of_range_are_errors_that_name_them(arguments, message):
    with pytest.raises(ConfigError, match=message):
        optim.sgd(**arguments)
