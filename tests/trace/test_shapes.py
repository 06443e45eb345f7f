"""Results of operations are worked out once a question: they are those of torch, and each call gets tensors of its own."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch

import functional_par as fp
from functional_par.trace import shapes
from functional_par.trace.follow import Typing
from functional_par.trace.shapes import Meta

DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.bool)
NUMBERS = {"number": (2, 0.5, True, float("nan")), "float": (0.5,), "int": (1,), "bool": (False,), "str": ("none",)}


def elementwise():
    """Every operation of torch's own that it calls pointwise and that makes new tensors."""
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten)]
    found = [getattr(p, name) for p in packets if hasattr(p, "overloads") for name in p.overloads()]
    return [op for op in found if torch.Tag.pointwise in op.tags and shapes.pure(op)]


def arguments(op, rng):
    """Tensors whose shapes are broadcast to each other, mostly, and numbers."""
    full = [rng.choice([1, 2, 3]) for _ in range(rng.randint(0, 3))]
    given = []
    for kind in (str(a.type).removeprefix("Optional[").rstrip("]") for a in op._schema.arguments if not a.kwarg_only):
        shape = [size if rng.random() < 0.7 else 1 for size in full[rng.randint(0, len(full)) :]]
        x = torch.empty(shape, dtype=rng.choice(DTYPES), device="meta")
        x = x.mT if x.ndim > 1 and rng.random() < 0.2 else x
        given.append(x if kind == "Tensor" else rng.choice(NUMBERS.get(kind, (None,))))
    return tuple(given)


def outcome(function):
    """Shape, strides and dtype of the result, or that there is none."""
    try:
        return Meta.of(function())
    except Exception:
        return None


def test_every_elementwise_operation_has_the_shape_strides_and_dtype_that_torch_gives_it():
    rng = random.Random(0)
    seen = []
    for op in elementwise():
        for _ in range(2):
            args = arguments(op, rng)
            expected = outcome(lambda op=op, args=args: op(*args))
            assert outcome(lambda op=op, args=args: shapes.run(op, args, {})) == expected, (op, args)
            seen.append(expected)
    assert len(seen) > 400
    assert sum(found is not None for found in seen) > 150


X = torch.empty(2, 3, 4, device="meta")
W = torch.empty(4, 5, dtype=torch.float64, device="meta")


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        (torch.ops.aten.sum.dim_IntList, (X, [1], True), {"dtype": torch.float64}),
        (torch.ops.aten.mm.default, (W, W.mT), {}),
        (torch.ops.aten.cat.default, ([X, X.mT.mT, X[:1]], 0), {}),
        (torch.ops.aten.native_layer_norm.default, (X, [4], None, None, 1e-5), {}),
        (torch.ops.aten.topk.default, (X, 2), {}),
        (torch.ops.aten.add.Tensor, (X, True), {"alpha": 2}),
        (torch.ops.aten.add.Tensor, (X.expand(5, 2, 3, 4), X), {}),
        (torch.ops.aten.arange.default, (4.0,), {"device": torch.device("meta")}),
        (torch.ops.aten.arange.default, (4,), {"device": torch.device("meta")}),
        (torch.ops.aten.view_as_complex.default, (torch.empty(3, 2, device="meta"),), {}),
        (torch.ops.aten._unsafe_view.default, (X, [6, 4]), {}),
        (torch.ops.aten.masked_fill.Scalar, (X, X > 0, float("nan")), {}),
    ],
    ids=lambda x: str(x) if hasattr(x, "tags") else "",
)
def test_other_operations_return_what_torch_returns_and_views_share_memory(op, args, kwargs):
    def results(found):
        return [found] if isinstance(found, torch.Tensor) else list(found)

    def memory(found):
        return [x.untyped_storage()._cdata == X.untyped_storage()._cdata for x in found], [
            x.untyped_storage().nbytes() for x in found
        ]

    expected = results(op(*args, **kwargs))
    first, second = results(shapes.run(op, args, kwargs)), results(shapes.run(op, args, kwargs))
    assert [Meta.of(x) for x in first] == [Meta.of(x) for x in second] == [Meta.of(x) for x in expected]
    assert memory(first) == memory(second) == memory(expected)
    assert not {id(x) for x in first} & {id(x) for x in second}


def test_numbers_that_are_equal_are_not_the_same_question():
    dtypes = [shapes.run(torch.ops.aten.mul.Scalar, (X.long(), two), {}).dtype for two in (2, 2.0, True)]
    assert dtypes == [torch.int64, torch.float32, torch.int64]
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert shapes.run(torch.ops.aten.mul.Scalar, (X.long(), 2.0), {}).dtype == torch.float64
    finally:
        torch.set_default_dtype(default)


def test_a_shape_that_torch_refuses_is_refused_each_time():
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"The size of tensor a \(3\)|broadcast"):
            shapes.run(torch.ops.aten.add.Tensor, (X[0], torch.empty(2, 4, device="meta")), {})


def test_nothing_of_a_trace_outlives_it(monkeypatch):
    made = []

    def noting(*args):
        typing = Typing(*args)
        made.append(weakref.ref(typing))
        return typing

    monkeypatch.setattr("functional_par.trace.infer.Typing", noting)
    model = fp.models.gpt(vocab=16, d_model=8, n_layers=1, n_heads=2, seq_len=4)
    fp.compose(fp.shard_tp(), fp.dp_reduce())(model).plan(fp.Mesh(tp=2, dp=2))
    gc.collect()
    assert len(made) >= 8
    assert not any(typing() for typing in made)
