"""Models as users write them: what `paths` may be, ties, losses, batches and counts, and every refusal."""

from __future__ import annotations

import re

import pytest
import torch

import functional_par as fp
from functional_par import Input, Model, ModelError, Param, tree
from functional_par.model import Layer

P = Param((3,), "embed")
PARAMS = {"a": {"w": P, "b": P}, "c": P, "deep": {"er": {"w": P}}}


def loss(params, x, par):
    return x.sum(), torch.tensor(len(par.batch["tokens"]))


def spy(seen):
    def fn(params, x, par):
        seen.append(params)
        return x

    return fn


def leaves(n=1.0):
    return {"a": {"w": torch.full((3,), n), "b": torch.full((3,), 2 * n)}, "c": torch.full((3,), 3 * n)} | {
        "deep": {"er": {"w": torch.full((3,), 4 * n)}}
    }


def received(paths):
    """What a layer with these paths gets as params."""
    seen = []
    rest = list(tree.flatten(PARAMS))
    model = Model(
        PARAMS,
        [("spy", paths, spy(seen)), ("rest", rest, lambda p, x, par: torch.stack(list(tree.flatten(p).values())))],
        loss,
    )
    model(leaves(), {"tokens": torch.zeros(2, 4, dtype=torch.int64), "labels": torch.zeros(2, 4, dtype=torch.int64)})
    return seen[0], model.layers[0]


def as_numbers(params):
    if isinstance(params, torch.Tensor):
        return params[0].item()
    return {path: x[0].item() for path, x in tree.flatten(params).items()}


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ("c", 3.0),
        ("a.b", 2.0),
        ("a", {"w": 1.0, "b": 2.0}),
        ("deep", {"er.w": 4.0}),
        (["c"], {"c": 3.0}),
        (("a.w", "c"), {"a.w": 1.0, "c": 3.0}),
        (["a", "deep.er"], {"a.w": 1.0, "a.b": 2.0, "deep.er.w": 4.0}),
        ({"left": "a", "right": "c"}, {"left.w": 1.0, "left.b": 2.0, "right": 3.0}),
        ({"same": "a.w", "again": "a.w"}, {"same": 1.0, "again": 1.0}),
        ({"x": "deep.er"}, {"x.w": 4.0}),
        ([], {}),
    ],
    ids=str,
)
def test_paths_say_what_a_layer_receives(paths, expected):
    params, layer = received(paths)
    assert as_numbers(params) == expected
    assert layer.paths == tuple(dict.fromkeys(layer.paths))


def test_the_first_layer_receives_the_batch_and_every_layer_sees_it():
    batch = {"tokens": torch.ones(2, 4, dtype=torch.int64), "labels": torch.ones(2, 4, dtype=torch.int64)}

    def first(p, x, par):
        assert x is batch
        return p * x["tokens"].sum()

    def second(p, x, par):
        assert par.batch is batch
        return x * p

    model = Model({"a": P, "b": P}, [("first", "a", first), ("second", "b", second)], loss)
    value = model({"a": torch.ones(3), "b": torch.full((3,), 2.0)}, batch)
    assert value.item() == 3 * 8 * 2 / 2


def test_reading_one_path_in_two_layers_is_a_tie_whose_gradient_is_the_sum():
    model = Model({"a": P}, [("x", "a", lambda p, x, par: p * 2), ("y", "a", lambda p, x, par: x * p)], loss)
    params, batch = {"a": torch.tensor([1.0, 2.0, 3.0])}, {"tokens": torch.zeros(1, 1)}
    grads = torch.func.grad(lambda p: model(p, batch))(params)
    assert torch.equal(grads["a"], 4 * params["a"])
    assert [layer.paths for layer in model.layers] == [("a",), ("a",)]


def test_a_loss_may_have_parameters():
    def scaled(p, x, par):
        return (x * p["c"]).sum(), torch.tensor(4)

    model = Model({"a": P, "c": P}, [("x", "a", lambda p, x, par: p)], (["c"], scaled))
    assert model({"a": torch.ones(3), "c": torch.full((3,), 2.0)}, {"tokens": torch.zeros(1, 1)}).item() == 6 / 4
    assert model.loss.name == "loss"
    assert model.all_layers[-1] is model.loss


def test_a_plain_loss_gets_an_empty_dict():
    seen = []

    def empty(p, x, par):
        seen.append(p)
        return x.sum(), torch.tensor(1)

    Model({"a": P}, [("x", "a", lambda p, x, par: p)], empty)({"a": torch.ones(3)}, {"tokens": torch.zeros(1, 1)})
    assert seen == [{}]


def test_a_count_of_zero_gives_the_sum():
    model = Model({"a": P}, [("x", "a", lambda p, x, par: p * 0)], lambda p, x, par: (x.sum(), torch.tensor(0)))
    assert model({"a": torch.ones(3)}, {"tokens": torch.zeros(1, 1)}).item() == 0.0


def test_terms_are_labels_that_are_not_ignored_or_rows_or_what_count_says():
    batch = {"tokens": torch.zeros(3, 2), "labels": torch.tensor([[1, -100], [0, 2], [-100, -100]])}
    layers = [("x", "a", lambda p, x, par: p)]
    assert Model({"a": P}, layers, loss).count_terms(batch) == 3
    assert Model({"a": P}, layers, loss, {"image": Input((None, 2))}).count_terms({"image": torch.zeros(5, 2)}) == 5
    counted = Model({"a": P}, layers, loss, count=lambda b: (b["tokens"] == 0).sum())
    assert counted.count_terms(batch) == 6


def test_the_default_batch_is_tokens_and_labels_of_any_shape():
    assert Model({"a": P}, [("x", "a", lambda p, x, par: p)], loss).batch == {
        "tokens": Input((None, None), torch.int64),
        "labels": Input((None, None), torch.int64),
    }


def test_initial_values_follow_from_seed_and_path_alone():
    one = Model({"a": P, "b": P}, [("x", ["a", "b"], lambda p, x, par: p["a"] * p["b"])], loss)
    two = Model({"b": P, "z": {"y": P}}, [("x", ["b", "z"], lambda p, x, par: p["b"])], loss)
    assert torch.equal(one.init(3)["b"], two.init(3)["b"])
    assert not torch.equal(one.init(3)["a"], one.init(3)["b"])
    assert not torch.equal(one.init(3)["a"], one.init(4)["a"])
    assert one.init(0, torch.float64)["a"].dtype == torch.float64
    assert one.init(0, device="meta")["a"].is_meta


def test_renaming_moves_reads_and_drops_the_leaf():
    model = Model(PARAMS, [("x", ["a", "c", "deep"], lambda p, x, par: p["a"]["w"] * p["c"])], loss)
    renamed = model.rename({"c": "a.w"})
    assert list(renamed.leaves) == ["a.w", "a.b", "deep.er.w"]
    assert renamed.layers[0].paths == ("a.w", "a.b", "deep.er.w")
    params = leaves()
    del params["c"]
    batch = {"tokens": torch.zeros(1, 1)}
    assert renamed(params, batch).item() == 3.0  # a.w * a.w
    assert model(leaves(), batch).item() == 9.0


def test_layer_objects_are_layers_too():
    model = Model({"a": P}, [("x", "a", lambda p, x, par: p)], loss)
    again = Model({"a": P}, model.layers, model.loss)
    assert again.layers == model.layers
    assert isinstance(again.layers[0], Layer)


def fn(p, x, par):
    return x


GOOD = [("x", "a", fn)]

REFUSED = [
    ({"params": {"a": torch.ones(3)}}, "params['a'] is Tensor, not fp.Param(shape, dims)."),
    ({"params": {"a": {"b": None}}}, "params['a.b'] is NoneType, not fp.Param(shape, dims)."),
    ({"params": {"a.b": P}}, "'a.b': a key of a parameter tree is a non-empty string without a dot."),
    ({"layers": []}, "a model has at least one layer."),
    ({"layers": [("x", "a", fn), ("x", "a", fn)]}, "layer names are not unique: x. ('loss' is the name of the loss.)"),
    ({"layers": [("loss", "a", fn)]}, "layer names are not unique: loss. ('loss' is the name of the loss.)"),
    ({"layers": [("x", "b", fn)]}, "layer 'x' reads 'b', which is not in params. Leaves: a."),
    ({"layers": [("x", ["a", "a.w"], fn)]}, "layer 'x' reads 'a.w', which is not in params. Leaves: a."),
    ({"layers": [("x", {"k": "b"}, fn)]}, "layer 'x' reads 'b', which is not in params. Leaves: a."),
    ({"params": {"a": P, "b": P, "c": P}}, "no layer reads b, c: name it in a layer's paths or leave it out."),
    ({"layers": [("x", "a")]}, "layer ('x', 'a') is not a (name, paths, fn) triple."),
    ({"layers": [fn]}, "is not a (name, paths, fn) triple."),
    ({"layers": [(3, "a", fn)]}, "layer (3, ..., "),
    ({"layers": [("x", "a", 3)]}, "layer ('x', ..., 3): the name is a string and fn is a function (params, x, par)."),
    ({"loss": 3}, "loss 3 is not a function (params, x, par) -> (sum, count), or a pair (paths, function)."),
    (
        {"loss": ("a", 3)},
        "loss ('a', 3) is not a function (params, x, par) -> (sum, count), or a pair (paths, function).",
    ),
    ({"loss": ("a", "b", fn)}, "is not a function (params, x, par) -> (sum, count), or a pair (paths, function)."),
    ({"loss": ("b", fn)}, "layer 'loss' reads 'b', which is not in params. Leaves: a."),
    ({"layers": [("x", None, fn)]}, "layer 'x' has the paths None: a dotted name, a list of them, or a dict"),
    ({"layers": [("x", ["a", 3], fn)]}, "layer 'x' has the paths ['a', 3]: a dotted name, a list of them, or a dict"),
    ({"layers": [("x", {"b.c": "a"}, fn)]}, "a key of a parameter tree is a non-empty string without a dot."),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED, ids=[message[:50] for _, message in REFUSED])
def test_a_wrong_entry_is_refused_and_named(wrong, message):
    arguments = {"params": {"a": P}, "layers": GOOD, "loss": loss} | wrong
    with pytest.raises(ModelError, match=re.escape(message)):
        Model(**arguments)
    with pytest.raises(ValueError):
        fp.Model(**arguments)
