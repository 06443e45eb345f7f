"""Over random models: what is accepted is right, what is right by construction is accepted, and what is refused is wrong by
the numbers, found by running the ranks without any check.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

import functional_par as fp
from functional_par import tree
from functional_par.errors import ModelError, TraceError
from functional_par.run_par import RunPar
from tests.trace.grammar import Operation, model_of, operations
from tests.trace.harness import TOLERANCE, batch_of, far, judge, program_of, reference

few = settings(max_examples=max(1, settings.default.max_examples // 3))
"""Every example starts ranks."""

tps = st.sampled_from([2, 3])
engines = st.sampled_from(["func", "tape"])


@few
@given(operations(faulty=False), tps, engines)
def test_a_model_without_a_fault_is_accepted_and_right(ops, tp, engine):
    judge(model_of(ops), fp.Mesh(tp=tp), engine=engine, rows=1).check()


@few
@given(operations(faulty=True), tps)
def test_a_model_with_a_fault_is_right_or_refused_with_a_reason(ops, tp):
    examine(ops, tp)


@few
@given(operations(faulty=False), st.data(), tps)
def test_leaves_shared_by_layers_are_right_or_refused_with_a_reason(ops, data, tp):
    later = data.draw(st.integers(0, len(ops)))
    ops = [*ops, Operation("scale", split_after(ops), borrow=f"op{later}.g" if later < len(ops) else "")]
    examine(ops, tp)


def split_after(ops):
    return sum(op.kind in ("switch", "mlp switching") for op in ops) % 2 == 1


def examine(ops, tp):
    """Accepted: if the loss is the reference's, so are the gradients. Refused: the numbers are wrong without the check."""
    model = model_of(ops)
    try:
        program_of(model).plan(fp.Mesh(tp=tp))
    except TraceError as error:
        note(str(error))
        assert wrong_without_a_check(model, tp), "refused, but right"
        return
    except ModelError as error:
        note(str(error))  # shapes that do not fit, since a fault changed them
        return
    verdict = judge(model, fp.Mesh(tp=tp), rows=1)
    assert not verdict.same_function or not verdict.wrong


def wrong_without_a_check(model, tp):
    """True if the loss is not the reference's on every rank, or if for some leaf neither the gradient of each rank nor
    the sum over the ranks is the reference's. This knows nothing of types, plans or debts."""
    batch = batch_of(model, rows=1)
    loss, grads = reference(model, batch)
    whole = tree.flatten(model.init(0, torch.float64))

    def cut(path, x, rank):
        names = model.leaves[path].names
        return x.chunk(tp, names.index("ffn"))[rank] if "ffn" in names else x

    def main(world):
        leaves = {path: cut(path, x, world.rank).clone().requires_grad_() for path, x in whole.items()}
        par = RunPar({("tp",): world.group("tp")}, batch=batch)
        mine = model(tree.unflatten(leaves), batch, par)
        found = torch.autograd.grad(mine, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return mine.detach(), dict(zip(leaves, found, strict=True))

    try:
        results = fp.run(main, fp.Mesh(tp=tp), backend="threads", timeout=30.0)
    except (RuntimeError, ValueError):
        return True  # it does not even run
    if any(far(mine, loss) > TOLERANCE for mine, _ in results):
        return True
    return any(leaf_is_wrong(path, [found[path] for _, found in results], grads[path], cut) for path in grads)


def leaf_is_wrong(path, found, expected, cut):
    wanted = [cut(path, expected, rank) for rank in range(len(found))]
    alone = all(far(got, want) <= TOLERANCE for got, want in zip(found, wanted, strict=True))
    summed = far(torch.stack(found).sum(0), expected) <= TOLERANCE if found[0].shape == expected.shape else False
    return not alone and not summed


@pytest.mark.parametrize("split", [False, True])
def test_the_oracle_finds_right_what_is_right_and_wrong_what_is_wrong(split):
    first = [Operation("switch", False)] if split else []
    right = [*first, Operation("residual mlp", split), Operation("scale", split)]
    assert not wrong_without_a_check(model_of(right), 2)
    for fault in ("no entry", "no exit", "double entry"):
        assert wrong_without_a_check(model_of([*first, replace(right[-2], fault=fault)]), 2)
