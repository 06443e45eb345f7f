"""Weight gradients that come later, as pairs kept as data, are those of a whole backward, bit for bit."""

from __future__ import annotations

import gc
import re
import weakref
from functools import cache

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import functional_par as fp
from functional_par import Mesh, Model, ModelError
from functional_par.capture import Product, Ready, Rows, Total
from functional_par.pipeline.stage import stage_calls
from functional_par.run_par import RunPar
from functional_par.tree import flatten
from functional_par.vjp import engine

from ..oracle import close, gradients, token_batch
from ..toys import odd, small_gpt, small_llama
from .uses import HIDDEN, by, every_use

MICROBATCHES, SEQ = 3, 4
MODELS = {"every use": every_use, "gpt": small_gpt, "llama": small_llama, "odd": odd}
BATCHES = {"every use": 7, "gpt": 13, "llama": 13, "odd": 11}


def batch_of(name):
    return token_batch(BATCHES[name], 2 * MICROBATCHES, SEQ)


@cache
def reference(name):
    model = MODELS[name]()
    return gradients(model, flatten(model.init(0, torch.float64)), batch_of(name))[1]


def stepped(name, kinds, mesh=None, transforms=(), dtype=torch.float64, **options):
    """The gradients of two steps (in the first one each layer finds out how it uses its leaves) by each kind of schedule; the
    learning rate is 0, so that both steps have the same."""
    mesh, batch = mesh or Mesh(), batch_of(name)
    programs = [fp.compose(*transforms, by(kind, MICROBATCHES))(MODELS[name]()) for kind in kinds]

    def main(world):
        found = []
        for program in programs:
            step = program.step(world, fp.optim.sgd(lr=0.0, momentum=0.5), dtype=dtype, **options)
            state = step.init(0)
            for _ in range(2):
                moved, _ = step(state, batch)
                found.append(flatten(step.gather_opt(moved)["momentum"]))
        return found

    return fp.run(main, mesh, backend="threads", timeout=60.0)[0]


def same(found, like):
    assert found.keys() == like.keys()
    for path, grad in like.items():
        assert torch.equal(found[path], grad), path


@pytest.mark.parametrize("name", MODELS)
def test_halves_of_a_backward_have_the_bits_of_the_whole_in_both_engines(name):
    kinds = ("whole", "halves", "late", "between")
    runs = [run for e in ("func", "tape") for run in stepped(name, kinds, engine=e, poison=True)]
    for run in runs:
        same(run, runs[0])
    for path, grad in reference(name).items():
        close(runs[0][path], grad, path)


@pytest.mark.parametrize("name", ["every use", "gpt"])
def test_weight_gradients_may_come_in_any_order(name):
    for run in stepped(name, ["any order"], engine="tape"):
        for path, grad in reference(name).items():
            close(run[path], grad, path)


@pytest.mark.parametrize("mode", ["ALL_REDUCE", "REDUCE_SCATTER"])
@pytest.mark.parametrize("async_comm", [False, True])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_halves_have_the_bits_of_the_whole_over_tp_too(name, mode, async_comm):
    split = fp.shard_tp(mode=mode, async_comm=async_comm)
    runs = stepped(name, ["whole", "late"], Mesh(tp=2), [split], engine="tape" if async_comm else "func")
    for run in runs:
        same(run, runs[0])
    for path, grad in reference(name).items():
        close(runs[0][path], grad, path)


class Sums:
    """Where gradients add up, and what came as a whole gradient."""

    def __init__(self, leaves, dtype=None):
        self.leaves = {path: torch.full_like(x, torch.nan, dtype=dtype) for path, x in leaves.items()}
        self.written, self.whole = set(), []

    def add(self, grads):
        for path, grad in grads.items():
            buffer, first = self.buffer(path)
            buffer.copy_(grad if first else buffer + grad)
            self.whole.append(path)

    def buffer(self, path):
        first = path not in self.written
        self.written.add(path)
        return self.leaves[path], first


class Single:
    """The layers of a model in one process, call by call."""

    def __init__(self, model, batch, name="tape", dtype=torch.float64):
        plan = fp.compose()(model).plan(Mesh())
        shapes = {field: (tuple(x.shape), x.dtype) for field, x in batch.items()}
        self.calls = stage_calls(plan, plan.trace(shapes, dtype), 0)
        self.par, self.batch, self.engine = RunPar(batch=batch), batch, engine(name)
        self.leaves = flatten(model.init(0, dtype))

    def forward(self):
        x, backs = list(self.batch.values()), []
        for call in self.calls:
            x, back = call.forward(self.engine, self.leaves, x, self.par)
            backs.append(back)
        return x, backs

    def backward(self, x, backs, sums, later):
        cts = [torch.ones_like(x[0]) / x[1]]
        while backs:
            cts = backs.pop()(cts, sums, later)

    def round(self, later=None, dtype=None):
        sums = Sums(self.leaves, dtype)
        self.backward(*self.forward(), sums, later)
        return sums


@pytest.mark.parametrize("name", ["func", "tape"])
def test_leaves_that_are_captured_and_nothing_else_are_no_longer_differentiated_after_the_first_backward(name):
    single = Single(every_use(), batch_of("every use"), name)
    for _ in range(2):
        sums = single.round()
        found = {
            call.layer.name: {path.split(".")[1]: n for path, n in call.uses.hidden.items()} for call in single.calls
        }
        expected = {**HIDDEN, "tied": {"ordinary": 1}}
        assert found == expected
        # What has an ordinary use comes as a gradient, from the first call on; nothing else does.
        hidden = {f"{layer}.{leaf}" for layer, leaves in expected.items() for leaf in leaves} - {"body.ordinary"}
        trained = {path for call in single.calls for path in call.trainable}
        assert set(sums.whole) == trained - hidden
    _, backs = single.forward()
    assert {path for back in backs for path in back.primals} == trained - hidden


def test_what_waits_is_inputs_and_cotangents_and_gradients_with_parts_that_wait():
    single = Single(every_use(), batch_of("every use"))
    later = []
    sums = single.round(later)
    kinds = {kind: {pair.path for pair in later if isinstance(pair, kind)} for kind in (Product, Total, Rows, Ready)}
    assert kinds[Rows] == {"entry.table"}
    assert kinds[Total] == {"enter.b", "body.bias", "body.view_bias", "body.free_bias"}
    assert kinds[Ready] == {"body.both", "body.ordinary"}
    assert len(later) == len({id(pair) for pair in later})
    assert not kinds[Product] & set(sums.whole)
    for pair in reversed(later):
        pair.add_to(sums)
    for path, grad in reference("every use").items():
        close(sums.leaves[path], grad, path)


@pytest.mark.parametrize("name", ["func", "tape"])
def test_pairs_hold_plain_tensors_and_nothing_of_the_graph(name):
    single = Single(small_llama(), batch_of("llama"), name)
    single.round()
    x, backs = single.forward()
    alive = [weakref.ref(back.capture) for back in backs]
    later = []
    single.backward(x, backs, Sums(single.leaves), later)
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)
    for pair in later:
        for tensor in vars(pair).values():
            if isinstance(tensor, torch.Tensor):
                assert tensor.grad_fn is None
                assert not tensor.requires_grad
                assert not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    # The input of gate and up is kept once.
    of = {pair.path: pair for pair in later if isinstance(pair, Product)}
    gate, up = (of[f"blocks.0.mlp.{name}.weight"] for name in ("gate", "up"))
    assert gate.x.data_ptr() == up.x.data_ptr()


class Sizes(TorchDispatchMode):
    """Elements of every tensor that an operation makes, and does not get."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in _tensors([args, kwargs])}
        self.made += [x.numel() for x in _tensors(out) if x.untyped_storage().data_ptr() not in given]
        return out


def _tensors(value):
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("halves", [False, True])
def test_no_temporary_has_the_size_of_a_weight(halves):
    # Three positions and a weight of 64 x 32: what is made for the rows is far smaller.
    def first(p, batch, par):
        x = fp.nn.embedding(batch["tokens"], p["table"], par, vocab=64)
        return fp.nn.row_linear(fp.nn.column_linear(x, p["up"], par).tanh(), p["down"], par)

    def loss(p, x, par):
        return x.square().sum(), par.batch["labels"].numel() + 0 * par.batch["labels"].sum()

    names = {"table": (64, 32), "up": (64, 32), "down": (32, 64)}
    params = {name: fp.Param(shape, "out in", fp.init.normal(0.5)) for name, shape in names.items()}
    batch = {name: torch.arange(3).view(1, 3) for name in ("tokens", "labels")}
    single = Single(Model(params, [("first", list(names), first)], loss), batch, dtype=torch.float32)
    single.round()
    sums, later = Sums(single.leaves), [] if halves else None
    with Sizes() as sizes:
        single.backward(*single.forward(), sums, later)
        for pair in later or []:
            pair.add_to(sums)
    assert sizes.made
    assert max(sizes.made) < 64 * 32
    assert sums.written == set(names)


def test_in_float32_a_fused_sum_and_a_separate_one_differ_by_rounding_alone():
    x, ct, before = (
        torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((9, 5), (9, 7), (7, 5))
    )
    sums = Sums({"w": before})
    sums.written.add("w")
    sums.leaves["w"].copy_(before)
    Product("w", x, ct).add_to(sums)
    torch.testing.assert_close(sums.leaves["w"], before + ct.T @ x, rtol=1e-6, atol=1e-6)


def test_bfloat16_parameters_accumulate_in_float32_without_rounding_each_gradient():
    x, ct = (torch.randn(9, n, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (5, 7))
    ids = torch.tensor([1, 3, 1, 1, 0, 3, 3, 3, 1])
    shapes = {"w": (7, 5), "b": (7,), "table": (4, 7)}
    sums = Sums({path: torch.empty(shape, dtype=torch.bfloat16) for path, shape in shapes.items()}, torch.float32)
    pairs = [Product("w", x, ct), Total("b", ct), Rows("table", ids, ct)]
    for times in (1, 2):
        for pair in pairs:
            pair.add_to(sums)
        wide = ct.double()
        expected = {"w": wide.T @ x.double(), "b": wide.sum(0)}
        expected["table"] = torch.zeros(4, 7).double().index_add_(0, ids, wide)
        for path, value in expected.items():
            torch.testing.assert_close(sums.leaves[path].double(), times * value, rtol=1e-6, atol=1e-6)


def test_steps_with_bfloat16_parameters_have_the_same_bits_in_halves():
    runs = stepped("llama", ["whole", "late"], dtype=torch.bfloat16)
    for run in runs:
        same(run, runs[0])
    for path, grad in reference("llama").items():
        assert (runs[0][path] - grad).norm() <= 0.05 * max(grad.norm(), 0.1), path


def test_a_checkpoint_keeps_the_captured_gradients_right():
    def block(p, x, par):
        def inside(x):
            return x + fp.nn.column_linear(x.tanh(), p["w"], par, p["b"]).sin() @ p["plain"]

        if x.is_meta:
            return inside(x)
        return torch.utils.checkpoint.checkpoint(inside, x, use_reentrant=False)

    model = every_use()
    square = fp.Param((4, 4), "out in", fp.init.normal(0.5))
    params = {**model.params, "block": {"w": square, "b": model.params["enter"]["b"], "plain": square}}
    layers = [*model.layers[:2], ("block", "block", block), *model.layers[2:]]
    model = Model(params, layers, model.loss)
    single = Single(model, batch_of("every use"))
    for _ in range(2):
        sums, later = Sums(single.leaves), []
        single.backward(*single.forward(), sums, later)
        for pair in later:
            pair.add_to(sums)
        for path, grad in gradients(model, single.leaves, single.batch)[1].items():
            close(sums.leaves[path], grad, path)
    (call,) = (call for call in single.calls if call.layer.name == "block")
    assert call.uses.hidden == {"block.w": 1, "block.b": 1}


def test_a_derivative_that_a_layer_takes_by_itself_is_differentiated_as_usual():
    def block(p, x, par):
        if x.is_meta:
            return x + p["w"].sum() * 0
        y = x.detach().requires_grad_() if not x.requires_grad else x
        inner = fp.nn.column_linear(y, p["w"], par).tanh().square().sum()
        (force,) = torch.autograd.grad(inner, y, create_graph=True)
        return x + force

    model = every_use()
    params = {**model.params, "block": {"w": fp.Param((4, 4), "out in", fp.init.normal(0.5))}}
    model = Model(params, [*model.layers[:2], ("block", "block", block), *model.layers[2:]], model.loss)
    single = Single(model, batch_of("every use"))
    for _ in range(2):
        sums = single.round()
        for path, grad in gradients(model, single.leaves, single.batch)[1].items():
            close(sums.leaves[path], grad, path)


def test_a_layer_that_stops_to_use_a_leaf_as_it_did_is_refused_because_its_gradient_would_be_lost():
    changed = []

    def head(p, x, par):
        return x @ p.T if changed else fp.nn.column_linear(x, p, par)

    model = every_use()
    params = {**model.params, "head": fp.Param((4, 4), "out in", fp.init.normal(0.5))}
    model = Model(params, [*model.layers, ("head", "head", head)], model.loss)
    single = Single(model, batch_of("every use"))
    single.round()
    changed.append(True)
    message = (
        "layer 'head' passed head to 0 functions of fp.nn, but to 1 in its first call. A layer does the same at every"
    )
    with pytest.raises(ModelError, match=re.escape(message)):
        single.round()
