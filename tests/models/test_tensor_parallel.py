from __future__ import annotations

import functools

import pytest
import torch

from functional_par import tree
from functional_par.mesh import Mesh
from functional_par.model import LOSS
from functional_par.models import gpt, llama
from functional_par.program import compose
from functional_par.run import run
from functional_par.run_par import RunPar
from functional_par.transforms import shard_tp

from .helpers import batch_of, close_leaves, noisy

MODELS = {
    "gpt": lambda: gpt(vocab=97, d_model=24, n_layers=2, n_heads=12, seq_len=12),
    "gpt without biases": lambda: gpt(vocab=97, d_model=24, n_layers=1, n_heads=12, seq_len=12, bias=False),
    "llama": lambda: llama(97, 24, 2, 12, 12, d_ff=48),
    "llama, 4 kv heads": lambda: llama(97, 24, 1, 12, 12, n_kv_heads=4, d_ff=48),
    "llama, 2 kv heads": lambda: llama(97, 24, 1, 12, 12, n_kv_heads=2, d_ff=48),
    "llama, 1 kv head": lambda: llama(97, 24, 1, 12, 12, n_kv_heads=1, d_ff=48),
}


def cut(x, spec, mesh, coords):
    """This rank's shard of a whole leaf, zero-padded."""
    for dim, (start, size) in enumerate(zip(spec.starts(mesh, coords), spec.local_shape(mesh), strict=True)):
        index = torch.arange(start, start + size)
        x = x.index_select(dim, index.clamp(max=x.shape[dim] - 1)) * (index < x.shape[dim]).view(
            *(-1 if i == dim else 1 for i in range(x.ndim))
        )
    return x


def join(parts, spec, like):
    """The whole gradient from the shards of all ranks, debts paid."""
    if "tp" in spec.axes:
        dim = spec.axes.index("tp")
        return torch.cat(parts, dim).narrow(dim, 0, like.shape[dim])
    if any(debt.axis == "tp" for debt in spec.owes):
        return torch.stack(parts).sum(0)
    for part in parts:
        close_leaves({spec.path: part}, {spec.path: parts[0]})
    return parts[0]


@functools.cache
def reference(name):
    model = MODELS[name]()
    params, batch = noisy(model), batch_of(97, 12)
    loss, pull = torch.func.vjp(lambda p: model(tree.unflatten(p), batch), params)
    return loss, pull(torch.ones((), dtype=torch.float64))[0]


@functools.cache
def program(name, mode, async_comm=False):
    return compose(shard_tp(mode=mode, async_comm=async_comm))(MODELS[name]())


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize(
    ("name", "async_comm"),
    [("gpt", True), ("gpt", False), ("llama", True), ("llama", False)]
    + [(name, True) for name in MODELS if "," in name]
    + [("gpt without biases", False)],
)
@pytest.mark.parametrize("mode", ["ALL_REDUCE", "REDUCE_SCATTER"])
def test_loss_and_gradients_on_tp_ranks_equal_one_process(name, tp, mode, async_comm):
    model, mesh = program(name, mode, async_comm).model, Mesh(tp=tp)
    params, batch = noisy(model), batch_of(97, 12)
    plan = program(name, mode, async_comm).plan(mesh)

    def main(world):
        par = RunPar({("tp",): world.group("tp")}, plan.mode, plan.async_comm, batch)
        local = {path: cut(x, plan.specs[path], mesh, world.coords) for path, x in params.items()}
        loss, pull = torch.func.vjp(lambda p: model(tree.unflatten(p), batch, par), local)
        with torch.no_grad():
            return loss, pull(torch.ones((), dtype=torch.float64))[0]

    results = run(main, mesh, backend="threads", timeout=60.0)
    expected, expected_grads = reference(name)
    for loss, _ in results:
        assert loss.item() == pytest.approx(expected.item(), abs=1e-10)
    grads = {path: join([r[1][path] for r in results], plan.specs[path], x) for path, x in params.items()}
    close_leaves(grads, expected_grads)


@pytest.mark.parametrize("name", ["gpt", "llama", "llama, 1 kv head"])
@pytest.mark.parametrize("async_comm", [False, True])
@pytest.mark.parametrize("mode", ["ALL_REDUCE", "REDUCE_SCATTER"])
def test_the_number_of_calls_is_the_closed_formula(name, mode, async_comm):
    model = program(name, mode, async_comm).model
    n = len(model.layers) - 2
    mesh, batch = Mesh(tp=2), batch_of(97, 12)
    plan = program(name, mode, async_comm).plan(mesh)
    params = noisy(model)

    def main(world):
        par = RunPar({("tp",): world.group("tp")}, plan.mode, plan.async_comm, batch)
        local = {path: cut(x, plan.specs[path], mesh, world.coords) for path, x in params.items()}
        with world.record.during("forward"):
            loss, pull = torch.func.vjp(lambda p: model(tree.unflatten(p), batch, par), local)
        with world.record.during("backward"), torch.no_grad():
            pull(torch.ones_like(loss))
        return {(phase, kind): calls for (phase, _, kind), calls in world.record.calls.items()}

    # A block leaves the stream twice and returns twice; the embedding returns, the head leaves; the loss adds two.
    if mode == "ALL_REDUCE":
        expected = {("forward", "all_reduce"): 2 * n + 1 + 2, ("backward", "all_reduce"): 2 * n + 1}
    else:
        expected = {
            ("forward", "all_reduce"): 2,
            ("forward", "all_gather"): 2 * n + 1,
            ("forward", "reduce_scatter"): 2 * n + 1,
            ("backward", "all_gather"): 2 * n + 1,
            ("backward", "reduce_scatter"): 2 * n + 1,
        }
    assert run(main, mesh, backend="threads") == [expected] * 2


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["ALL_REDUCE", "REDUCE_SCATTER"])
def test_every_layer_type_checks_and_the_loss_is_the_same_on_every_rank(name, mode):
    plan = program(name, mode).plan(Mesh(tp=4))
    trace = plan.trace()
    total, count = trace.layers[LOSS].output
    assert (total.value.axes, count.value.axes) == (frozenset(), frozenset())
    owing = {path for path, spec in plan.specs.items() if any(debt.axis == "tp" for debt in spec.owes)}
    whole = {path for path, spec in plan.specs.items() if "tp" not in spec.axes}
    split_use = {path for path in whole if ".attn.k." in path or ".attn.v." in path}
    assert owing == (whole if mode == "REDUCE_SCATTER" else split_use)
