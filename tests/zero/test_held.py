"""What ranks hold and send when they share out: the bytes that are promised, and no layer more than that."""

from __future__ import annotations

from itertools import groupby

import pytest
import torch

import functional_par as fp
from functional_par import Mesh
from functional_par.buckets import buckets, rest_sums
from functional_par.pipeline.memory import rank_memory
from functional_par.reduce import Gradients

from ..oracle import adamw, token_batch

VOCAB, ROWS, SEQ, PIECES = 64, 8, 4, 2
MESH = Mesh(dp=2, tp=2)


def model():
    return fp.models.llama(VOCAB, 32, 2, 4, SEQ, n_kv_heads=2, d_ff=64)


def program(zero):
    transforms = fp.shard_tp("REDUCE_SCATTER"), fp.stage_pp("zb-h1", PIECES), fp.dp_reduce(zero=zero)
    return fp.compose(*transforms)(model())


def memory_of(tensors):
    """Bytes of the storages of some tensors, each once."""
    found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(found.values())


def stepped(zero, dtype):
    """Of each rank the bytes of parameters, gradients and slots after a step, elements that they are views of, what the
    step communicated, and what it gathered."""
    made = program(zero)
    plan = made.plan(MESH)

    def main(world):
        seen = []

        def moves(grads, slots, params, step, *, inplace):
            seen.extend(grads.values())
            return plain.update(grads, slots, params, step, inplace=inplace)

        plain = adamw()
        spy = fp.optim.Optimizer("spy", plain.slots, plain.init, moves, plain.lr)
        step = made.step(world, spy, dtype=dtype, donate=True, engine="tape")
        state = step.init(0)
        world.record.clear()
        state, _ = step(state, token_batch(VOCAB, ROWS, SEQ))
        kinds = list(state.flat.values()), seen, [x for slot in state.flat_opt.values() for x in slot.values()]
        sizes = [sum(x.nbytes for x in kind) for kind in kinds]
        part = step.runner.part(fp.batch.share_of(plan, world, token_batch(VOCAB, ROWS, SEQ), dtype), training=True)
        return sizes, [memory_of(kind) for kind in kinds], world.record, step.runner.gathered, list(part.order)

    return plan, fp.run(main, MESH, backend="threads", timeout=60.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_each_rank_holds_its_part_of_optimizer_gradients_and_parameters_as_counted_before(dtype):
    whole = rank_memory(program(0).plan(MESH), dtype=dtype, optimizer=2)[0]
    whole = whole.parameters, whole.gradients, whole.state
    for zero in (1, 2, 3):
        plan, ranks = stepped(zero, dtype)
        counted = rank_memory(plan, dtype=dtype, optimizer=2)[0]
        counted = counted.parameters, counted.gradients, counted.state
        shared = zero == 3, zero > 1, True
        for sizes, storages, *_ in ranks:
            for i, share in enumerate(shared):
                expected = whole[i] / plan.replicas if share else whole[i]
                assert abs(counted[i] - expected) <= 0.05 * expected
                if i != 1 or share:  # what the optimizer sees of whole gradients is a slice
                    assert abs(storages[i] - expected) <= 0.05 * expected
                    assert sizes[i] <= counted[i] or sizes[i] <= expected
        first = ranks[MESH.rank(dp=0)][0]
        assert (first[0], first[2]) == (counted[0], counted[2])
        assert first[1] * (2 if dtype == torch.float64 else 3) == counted[2]  # bfloat16 has a master
        assert zero == 1 or first[1] == counted[1]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_calls_and_bytes_are_those_of_the_formula(zero):
    plan, ranks = stepped(zero, torch.float64)
    for rank, (_, _, record, gathered, order) in enumerate(ranks):
        mine = buckets(plan, rank)
        assert all(bucket.sliced for bucket in mine)
        times = 1 if zero == 1 else PIECES
        scattered = times * 8 * sum(bucket.elements for bucket in mine)
        assert record.calls["gradients", "dp", "reduce_scatter"] == times * len(mine)
        assert record.nbytes["gradients", "dp", "reduce_scatter"] == scattered
        further = list(rest_sums(plan, rank, mine))  # of slices of norms, those of all buckets together
        assert record.calls["gradients", "tp", "all_reduce"] == len(further) <= 1
        if zero == 3:
            layers = {layer.name: {*layer.paths} for layer in plan.model.all_layers}
            fills = [layer for layer, _ in groupby(layer for layer in order if layers[layer])]
            filled = [bucket for layer in fills for bucket in mine if {*bucket.paths} <= layers[layer]]
            assert gathered.fills == len(filled)
            assert gathered.peak == 2
        else:
            filled = mine if zero < 3 else ()
        assert record.calls["parameters", "dp", "all_gather"] == len(filled)
        assert record.nbytes["parameters", "dp", "all_gather"] == 8 * sum(bucket.part for bucket in filled)
        if zero == 1:  # as an all-reduce: 2 (n - 1) / n
            n, gathers = plan.replicas, record.nbytes["parameters", "dp", "all_gather"]
            sent = scattered * (n - 1) / n + gathers * (n - 1)
            assert sent == 2 * (n - 1) / n * 8 * sum(bucket.elements for bucket in mine)


def test_while_a_layer_runs_only_it_and_the_next_have_memory(monkeypatch):
    """And between steps none; whole gradients are those of two layers at most."""
    whole, made = [], program(3)
    done = Gradients.done

    def counted(self, paths):
        whole.append(sum(account._flat is not None for account in self._accounts))
        done(self, paths)

    monkeypatch.setattr(Gradients, "done", counted)

    def main(world):
        step = made.step(world, adamw(), dtype=torch.float64, engine="tape")
        gathered = step.runner.gathered
        enter, live = gathered.enter, []

        def entered(layer):
            enter(layer)
            live.append(sum(flat.untyped_storage().nbytes() > 0 for flat in gathered._flats))

        monkeypatch.setattr(gathered, "enter", entered)
        state, _ = step(step.init(0), token_batch(VOCAB, ROWS, SEQ))
        step.evaluate(state, token_batch(VOCAB, ROWS, SEQ))
        return live, [flat.untyped_storage().nbytes() for flat in gathered._flats]

    for live, after in fp.run(main, MESH, backend="threads", timeout=60.0):
        assert max(live) == 1
        assert not any(after)
    assert max(whole) == 1
