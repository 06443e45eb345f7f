"""What a step really keeps, in bytes of living memory, is what the plan says and ``explain`` prints."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import functional_par as fp
from functional_par import CompositionError
from functional_par.pipeline.kept import Kept, most_kept, most_waiting, stages_kept
from functional_par.pipeline.memory import rank_memory, stage_memory
from functional_par.pipeline.recording import Recording
from functional_par.pipeline.schedule import Schedule
from functional_par.report.text import size

from ..oracle import token_batch
from ..toys import odd, small_gpt, small_llama
from .test_remat import Operations
from .uses import by

MICROBATCHES, ROWS, SEQ = 3, 2, 4
SHAPES = dict.fromkeys(("tokens", "labels"), (ROWS, SEQ))
FIELDS = {name: (shape, torch.int64) for name, shape in SHAPES.items()}


class Alive(TorchDispatchMode):
    """Knows all memory that operations make, and which of it is still there."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        before = {x.untyped_storage()._cdata for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and (storage := x.untyped_storage())._cdata not in before:
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def bytes(self):
        self.made = {key: (ref, n) for key, (ref, n) in self.made.items() if not ref.expired()}
        return sum(n for _, n in self.made.values())


class Noting(Recording):
    """Notes how many bytes are alive before each action."""

    def __init__(self, alive):
        super().__init__()
        self.alive, self.seen = alive, {}

    def begin(self, action, device):
        self.seen[str(action)] = self.alive.bytes()

    def end(self, action, device):
        self.seen["end"] = self.alive.bytes()


def living(program, dtype):
    """Bytes that are alive before each action of the second step, beyond those before the first."""

    def main(world):
        step = program.step(world, fp.optim.sgd(0.0), dtype=dtype)
        state, batch = step.init(0), token_batch(13, MICROBATCHES * ROWS, SEQ)
        step(state, batch)
        with Alive() as alive:
            step(state, batch, noting := Noting(alive))
        return noting.seen

    seen = fp.run(main, fp.Mesh(), backend="threads")[0]
    return {action: n - seen["0F0"] for action, n in seen.items()}


EXTRA = 4 + 8 + 8
"""Bytes of a loss, of its count, and of what stands in for the labels, which the first layer does not read."""


@pytest.mark.parametrize("model", [small_gpt, small_llama])
def test_activations_are_counted_to_the_byte(model):
    for policies in ({"*": "full"}, {"*": "selective", "head": "full"}):
        program = fp.compose(fp.remat(policies), by("late", MICROBATCHES))(model())
        seen = living(program, torch.float32)
        plan = program.plan(fp.Mesh())
        (memory,), (kept,) = stage_memory(plan, FIELDS), stages_kept(plan, FIELDS)
        assert seen["0F2"] == 2 * (memory.saved + EXTRA)
        assert seen["0I0"] == memory.live * (kept.forward + EXTRA)
        assert seen["0W0"] == memory.live * (kept.waiting + EXTRA - 8)
        last = 2 * kept.waiting + kept.forward + kept.again  # while the last backward begins
        assert memory.activations == max(memory.live * kept.waiting, last) > memory.live * kept.forward
        more = f"3 * {size(memory.saved)} + {size(memory.activations - 3 * memory.saved)}"
        assert f"  {more}  " in str(program.explain(fp.Mesh(), SHAPES))


def test_without_remat_kernels_keep_no_more_than_their_definitions():
    program = fp.compose(by("late", MICROBATCHES))(small_gpt())
    (memory,) = stage_memory(program.plan(fp.Mesh()), FIELDS)
    seen = living(program, torch.float32)
    assert 0.8 * memory.activations < seen["0I0"] <= memory.activations
    assert seen["0W0"] <= memory.activations


def test_layers_that_run_again_are_told_with_what_is_kept_of_them():
    program = fp.compose(fp.remat({"block*": "full", "head": "selective"}))(small_gpt())
    assert "remat: kept are of block0-1 inputs; of head inputs and matrix products. What" in str(
        program.explain(fp.Mesh())
    )
    assert "remat" not in str(fp.compose(fp.remat("none"))(small_gpt()).explain(fp.Mesh()))


def test_the_most_is_kept_while_a_layer_runs_again_or_while_weight_gradients_wait():
    stage = Kept.of_stage([Kept(10, 0, 1), Kept(20, 100, 2), Kept(30, 5, 3)])
    assert stage == Kept(60, 130 - 60, 6)
    whole = Schedule.of("mine", [["0F0", "0F1", "0B0", "0B1"]])
    assert most_kept(whole, 0, [Kept(10, 5, 0)]) == 25
    halves = Schedule.of("mine", [["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"]])
    assert most_kept(halves, 0, [Kept(10, 5, 100)]) == 200
    assert most_kept(halves, 0, [Kept(10, 5, 1)]) == 25
    assert most_kept(Schedule.of("mine", [["0F0", "0F1"]]), 0, [Kept(10, 5, 100)]) == 10
    assert (most_waiting(halves, 0), most_waiting(whole, 0)) == (2, 0)


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_measured_bytes_are_those_that_are_counted(policy):
    program = fp.compose(fp.remat({"*": policy}), fp.stage_pp("zbv", 2))(odd())
    measured = fp.measure(program, SHAPES, torch.float64, rounds=1)
    for pp in (1, 2):
        plan = program.plan(fp.Mesh(pp=pp))
        counted = stage_memory(plan, FIELDS, torch.float64)
        assert counted == stage_memory(plan, FIELDS, torch.float64, saved=measured.saved)


def test_a_split_that_fits_counts_what_is_kept_of_layers_that_run_again():
    shapes = dict.fromkeys(SHAPES, (16, SEQ))
    fields = {name: (shape, torch.int64) for name, shape in shapes.items()}

    def needs(*transforms, **options):
        plan = fp.compose(*transforms, fp.stage_pp("1f1b", 4, **options))(small_gpt(blocks=4)).plan(fp.Mesh(pp=2))
        return max(memory.total for memory in rank_memory(plan, fields))

    for policy in ("full", "selective"):
        remat = fp.remat(policy)
        room = min(needs(remat, split=[n, 6 - n]) for n in range(1, 6))
        assert room < 0.8 * needs(split=[3, 3])
        assert needs(remat, memory=fp.MemoryBound(room, shapes)) == room
        with pytest.raises(CompositionError, match="no split of 6 layers on 2 stages fits into"):
            needs(remat, memory=fp.MemoryBound(room - 1, shapes))


class Look(torch.autograd.Function):
    """The identity, whose backward calls a function."""

    @staticmethod
    def forward(x, seen):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.seen = inputs[1]

    @staticmethod
    def backward(ctx, cotangent):
        if not cotangent.is_meta:
            ctx.seen()
        return cotangent.clone(), None


LAYERS = 4


def chain(seen):
    """Layers of a product and a tanh, whose result is saved. ``seen`` is called at the end of the backward of each."""

    def first(p, batch, par):
        return p[batch["tokens"]]

    def layer(p, x, par):
        return fp.nn.column_linear(Look.apply(x, seen), p, par).tanh()

    def loss(p, x, par):
        return x.square().sum(), par.batch["labels"].shape[0]

    square = fp.Param((4, 4), "out in", fp.init.normal(0.5))
    params = {"table": fp.Param((7, 4), "ids embed", fp.init.normal(0.5)), **{f"w{i}": square for i in range(LAYERS)}}
    layers = [("first", "table", first), *((f"layer{i}", f"w{i}", layer) for i in range(LAYERS))]
    return fp.Model(params, layers, loss, count=lambda batch: torch.tensor(len(batch["labels"])))


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("engine", ["func", "tape"])
def test_activations_are_freed_as_soon_as_their_backward_has_run(engine, policy):
    """While a layer's backward ends, of the layers after it nothing is left, in the first step, which learns, as in others."""
    alive, found = [], []
    program = fp.compose(fp.remat({"*": policy}))(chain(lambda: found.append(alive[0].alive())))

    def main(world):
        step = program.step(world, fp.optim.sgd(0.1), engine=engine)
        state = step.init(0)
        for _ in range(2):
            with Operations() as operations:
                alive[:] = [operations]
                step(state, token_batch(7, 2, 4))

    fp.run(main, fp.Mesh(), backend="threads")
    assert len(found) == 2 * LAYERS
    for at, each in enumerate(found):
        layer = LAYERS - 1 - at % LAYERS
        assert each[:layer] == [True] * layer
        assert not any(each[layer + 1 : LAYERS])
        # What ran again: one a layer, the last of them in this backward.
        assert len(each) == LAYERS + (at % LAYERS + 1 if policy == "full" else 0)
        assert not any(each[LAYERS:-1])


def test_parameters_gradients_and_state_are_counted_to_the_byte():
    program = fp.compose(fp.dp_reduce(), fp.shard_tp(), fp.precision())(small_llama())

    def main(world):
        step = program.step(world, fp.optim.adamw(0.1), donate=True)
        state, _ = step(step.init(0), token_batch(13, 4, 4))
        slots = [x for slot in state.flat_opt.values() for x in slot.values()]
        kept = state.flat.values(), step._kept.flat, slots
        return [sum(x.nbytes for x in each) for each in kept]

    mesh = fp.Mesh(dp=2, tp=2)
    (memory,) = stage_memory(program.plan(mesh))
    for parameters, gradients, state in fp.run(main, mesh, backend="threads"):
        assert (parameters, state) == (memory.parameters, memory.state)
        leaves = len(small_llama().leaves)
        assert memory.gradients <= gradients < memory.gradients + 4 * 16 * leaves  # places in a bucket are rounded
