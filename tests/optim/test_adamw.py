"""AdamW steps as torch.optim.AdamW does, purely or in place, with the same bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_par import optim
from functional_par.errors import ConfigError, StateError

SHAPES = {"a.weight": (7, 5), "a.bias": (5,), "scale": (), "empty": (0, 3)}


def leaves(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {path: torch.randn(shape, dtype=dtype, generator=generator) for path, shape in SHAPES.items()}


def copies(flat):
    return {path: leaf.clone() for path, leaf in flat.items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[path], second[path]) for path in first)


@settings(deadline=None, max_examples=8)
@given(
    st.floats(1e-5, 1.0),
    st.tuples(st.floats(0.0, 0.99), st.floats(0.0, 0.999)),
    st.sampled_from([0.0, 0.01, 0.5]),
    st.booleans(),
)
def test_twenty_steps_equal_torch_adamw(lr, betas, weight_decay, only_matrices):
    optimizer = optim.adamw(
        lr,
        betas,
        1e-8,
        weight_decay,
        decay=(lambda path: path.endswith("weight")) if only_matrices else lambda path: True,
    )
    params = leaves(0)
    theirs = {path: torch.nn.Parameter(leaf.clone()) for path, leaf in params.items()}
    decayed = [leaf for path, leaf in theirs.items() if path.endswith("weight") or not only_matrices]
    plain = [leaf for path, leaf in theirs.items() if not path.endswith("weight") and only_matrices]
    groups = [{"params": decayed}] + ([{"params": plain, "weight_decay": 0.0}] if plain else [])
    reference = torch.optim.AdamW(groups, lr, betas, 1e-8, weight_decay)
    slots = optimizer.init(params)
    for step in range(20):
        grads = leaves(step + 1)
        for path, leaf in theirs.items():
            leaf.grad = grads[path].clone()
        reference.step()
        params, slots = optimizer.update(grads, slots, params, step, inplace=step % 2 == 1)
    for path, leaf in theirs.items():
        torch.testing.assert_close(params[path], leaf.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_in_place_and_pure_updates_have_the_same_bits_and_the_pure_one_leaves_its_arguments_alone(dtype):
    optimizer = optim.adamw(1e-2)
    params, slots = leaves(0, dtype), optimizer.init(leaves(0, dtype))
    ours = copies(params)
    own_slots = {name: copies(slot) for name, slot in slots.items()}
    memory = {path: leaf.data_ptr() for path, leaf in ours.items()}
    for step in range(3):
        before, slots_before = copies(params), {name: copies(slot) for name, slot in slots.items()}
        new, new_slots = optimizer.update(leaves(step), slots, params, step, inplace=False)
        assert same(params, before)
        assert all(same(slots[name], slots_before[name]) for name in slots)
        ours, own_slots = optimizer.update(leaves(step), own_slots, ours, step, inplace=True)
        assert {path: leaf.data_ptr() for path, leaf in ours.items()} == memory
        assert same(ours, new)
        assert all(same(own_slots[name], new_slots[name]) for name in slots)
        params, slots = new, new_slots


def test_low_precision_parameters_have_float32_moments_and_take_float32_gradients():
    optimizer = optim.adamw(1e-2, weight_decay=0.1)
    params = leaves(0, torch.bfloat16)
    slots = optimizer.init(params)
    assert {leaf.dtype for slot in slots.values() for leaf in slot.values()} == {torch.float32}
    grads = leaves(1, torch.float32)
    exact = {path: leaf.float() for path, leaf in params.items()}
    exact, _ = optimizer.update(grads, slots, exact, 0, inplace=False)
    params, slots = optimizer.update(grads, slots, params, 0, inplace=False)
    assert same(params, {path: leaf.bfloat16() for path, leaf in exact.items()})
    assert {leaf.dtype for leaf in params.values()} == {torch.bfloat16}


def test_leaves_of_mixed_dtypes_and_strides_are_updated_each_as_if_alone():
    optimizer = optim.adamw(1e-2)
    wide = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    params = {"t": wide.t(), "columns": wide.clone()[:, ::2], "double": wide.double()}
    grads = {"t": wide.sin().t(), "columns": wide.cos()[:, ::2], "double": wide}
    plain = {path: leaf.clone(memory_format=torch.contiguous_format) for path, leaf in params.items()}
    together, _ = optimizer.update(grads, optimizer.init(params), params, 0, inplace=True)
    for path, leaf in plain.items():
        alone, _ = optimizer.update({path: grads[path]}, optimizer.init({path: leaf}), {path: leaf}, 0, inplace=True)
        assert torch.equal(together[path], alone[path])


def test_slicing_a_leaf_changes_nothing_but_rounding():
    optimizer = optim.adamw(1e-2)
    params, grads = leaves(0), leaves(1)
    whole, _ = optimizer.update(grads, optimizer.init(params), params, 0, inplace=False)
    part = {"a.weight": params["a.weight"][2:4]}
    sliced, _ = optimizer.update({"a.weight": grads["a.weight"][2:4]}, optimizer.init(part), part, 0, inplace=False)
    torch.testing.assert_close(sliced["a.weight"], whole["a.weight"][2:4], rtol=1e-15, atol=1e-15)


def test_leaves_without_a_gradient_stay_as_they_are():
    optimizer = optim.adamw(1e-2)
    params = leaves(0)
    grads = {"a.bias": leaves(1)["a.bias"]}
    new, slots = optimizer.update(grads, optimizer.init(grads), params, 0, inplace=False)
    assert [path for path in params if not torch.equal(new[path], params[path])] == ["a.bias"]
    assert set(slots["exp_avg"]) == {"a.bias"}


def test_the_rate_is_a_function_of_the_step():
    rate = optim.linear(1.0, train_steps=10)
    optimizer = optim.adamw(rate, weight_decay=0.0)
    params, grads = {"w": torch.ones(3, dtype=torch.float64)}, {"w": torch.ones(3, dtype=torch.float64)}
    new, _ = optimizer.update(grads, optimizer.init(params), params, 5, inplace=False)
    torch.manual_seed(0)
    alone, _ = optim.adamw(0.5, weight_decay=0.0).update(grads, optimizer.init(params), params, 5, inplace=False)
    assert torch.equal(new["w"], alone["w"])
    assert optimizer.lr(5) == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, r"adamw\(lr\) = -1\.0: a finite number of at least 0"),
        ({"lr": float("inf")}, r"adamw\(lr\) = inf"),
        ({"lr": "fast"}, r"adamw\(lr\) = 'fast'"),
        ({"lr": 0.1, "betas": (0.9, 1.0)}, r"adamw\(betas\)\[1\] = 1\.0: a number in \[0, 1\)"),
        ({"lr": 0.1, "betas": (-0.1, 0.9)}, r"adamw\(betas\)\[0\] = -0\.1"),
        ({"lr": 0.1, "betas": (0.9,)}, r"adamw\(betas\) = \(0\.9,\): two numbers"),
        ({"lr": 0.1, "eps": -1e-8}, r"adamw\(eps\) = -1e-08"),
        ({"lr": 0.1, "weight_decay": -0.1}, r"adamw\(weight_decay\) = -0\.1"),
    ],
)
def test_numbers_out_of_range_are_errors_that_name_them(arguments, message):
    with pytest.raises(ConfigError, match=message):
        optim.adamw(**arguments)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda g, s: g.update(ghost=torch.zeros(1)), r"a gradient for 'ghost', which is not a parameter"),
        (lambda g, s: s["exp_avg"].pop("a.bias"), r"slot 'exp_avg' has no 'a\.bias'"),
        (lambda g, s: g.update({"a.bias": torch.zeros(4)}), r"gradient of 'a\.bias' is \(4,\), the parameter \(5,\)"),
        (lambda g, s: s["exp_avg_sq"].update({"a.bias": torch.zeros(2)}), r"slot 'exp_avg_sq' of 'a\.bias' is \(2,\)"),
    ],
)
def test_state_and_gradients_of_other_parameters_are_errors_that_name_the_leaf(spoil, message):
    optimizer = optim.adamw(1e-2)
    params, grads, slots = leaves(0), leaves(1), optimizer.init(leaves(0))
    spoil(grads, slots)
    with pytest.raises(StateError, match=message):
        optimizer.update(grads, slots, params, 0, inplace=True)
    assert same(params, leaves(0))
