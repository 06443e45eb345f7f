"""Layers of one function and one type are traced once; nothing else is taken for the same; and it is fast."""

import dataclasses
import functools
import threading
import time

import pytest
import torch

import functional_par as fp
from functional_par.errors import MissingCollective
from functional_par.trace import infer
from tests.trace.harness import FIELDS, column, enter, judge, model_of, param, program_of, row, total
from tests.trace.programs import MLP, down, up


def deep_model(fn, depth):
    leaves = {f"l{i}": {"up": column(), "down": row(), "g": param(6)} for i in range(depth)}
    layers = [("enter", "enter", enter), *((name, name, fn) for name in leaves)]
    return fp.Model({"enter": {"w": param(6, 6)}, **leaves}, layers, total, FIELDS)


def test_a_hundred_layers_of_one_function_are_traced_once():
    calls = []

    def block(p, x, par):
        calls.append(1)
        return x + down(p, up(p, x, par), par) * p["g"]

    plan = program_of(deep_model(block, 100)).plan(fp.Mesh(tp=2))
    calls.clear()
    traced = plan.trace({"x": ((2, 6, 6), torch.float64), "ids": ((2, 6), torch.int64)})
    assert len(calls) == 1
    assert len(traced.layers) == 102
    assert {path: [debt.axis for debt in debts] for path, debts in traced.debts.items()} == {
        path: ["ep", "dp"] for path in plan.model.leaves
    }
    assert {use.layer for use in traced.layers["l57"].uses} == {"l57"}
    assert {use.source.path for use in traced.layers["l57"].uses} == {"l57.up", "l57.down", "l57.g"}


def test_a_trace_of_a_hundred_blocks_takes_milliseconds():
    model = fp.models.gpt(vocab=64, d_model=16, n_layers=100, n_heads=4, seq_len=8)
    plan = fp.compose(fp.shard_tp(), fp.dp_reduce(), fp.stage_pp())(model).plan(fp.Mesh(tp=2, dp=2))
    times = []
    for rows in (2, 3):
        start = time.thread_time()
        plan.trace(dict.fromkeys(("tokens", "labels"), ((rows, 8), torch.int64)))
        times.append(time.thread_time() - start)
    assert min(times) < 0.5


def test_the_same_function_is_traced_anew_for_another_type():
    def block(p, x, par):
        if x.shape[-1] == 6:
            return (x * p["g"])[..., :3]
        return par.psum(up(p, torch.cat([x, x], -1), par) @ p["down"].T * p["g"], "tp")

    model = deep_model(block, 4)
    verdict = judge(model, fp.Mesh(tp=2))
    verdict.check()
    owed = {
        path: [debt.axis for debt in spec.owes][2:] for path, spec in verdict.plan.specs.items() if path.endswith("g")
    }
    assert owed == {"l0.g": [], "l1.g": ["tp"], "l2.g": [], "l3.g": ["tp"]}


@dataclasses.dataclass(frozen=True)
class Equal:
    """Equal to every other, whatever it does."""

    split: bool = dataclasses.field(compare=False)

    def __call__(self, p, x, par):
        return down(p, up(p, x, par) if self.split else x @ p["up"].T, par)


def test_callables_that_compare_equal_are_not_taken_for_each_other():
    with pytest.raises(MissingCollective, match="layer 'second'"):
        program_of(model_of(Equal(True), MLP, after=[("second", "body", Equal(False))]))


@dataclasses.dataclass
class Unhashable:
    factor: float

    def __call__(self, p, x, par):
        return x * p["g"] * self.factor


def test_callables_need_no_hash():
    model = model_of(Unhashable(2.0), {"g": param(6)}, after=[("second", "body", Unhashable(3.0))])
    judge(model, fp.Mesh(tp=2)).check()


def test_partials_and_closures_are_functions_of_their_own():
    def scale(factor, p, x, par):
        return x[..., :factor].sum(-1, keepdim=True) * p["g"]

    after = [("second", "body", functools.partial(scale, 3)), ("third", "body", lambda p, x, par: scale(4, p, x, par))]
    judge(model_of(functools.partial(scale, 2), {"g": param(6)}, after=after), fp.Mesh(tp=2)).check()


def test_one_function_finds_its_leaves_by_name_not_by_order():
    def scale(p, x, par):
        return par.psum(up(p, x, par) @ p["down"].T * p["a"], "tp") + p["b"]

    names = {"up": "body.up", "down": "body.down"}
    leaves = {"a": param(6), "b": param(6), "c": param(6), "d": param(6), **MLP}
    after = [("second", {"b": "body.d", "a": "body.c", **names}, scale)]
    model = model_of(lambda p, x, par: x + 0 * (p["c"] * 1).detach(), leaves, after=[("first", "body", scale), *after])
    verdict = judge(model, fp.Mesh(tp=2))
    verdict.check()
    owed = {path: "tp" in [debt.axis for debt in spec.owes] for path, spec in verdict.plan.specs.items()}
    assert owed == {f"body.{name}": name in "ac" for name in leaves} | {"enter.w": False}


def test_ranks_that_are_threads_may_trace_at_once():
    models = [model_of(Equal(True), MLP), fp.models.gpt(vocab=64, d_model=16, n_layers=2, n_heads=4, seq_len=8)]
    plans = [program_of(model).plan(fp.Mesh(tp=2)) for model in models]
    expected = [plan.trace().debts for plan in plans]
    found, failures = [], []

    def work(seed):
        try:
            for i in range(2):
                plan = plans[(seed + i) % 2]
                setting = plan._setting(plan.example(), torch.float64)
                found.append((infer.trace(plan.model, setting).debts, expected[(seed + i) % 2]))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(found) == 8
    assert all(got == wanted for got, wanted in found)


def test_a_plan_traces_each_shape_once_for_all_ranks(monkeypatch):
    calls = []
    plan = program_of(model_of(Equal(True), MLP)).plan(fp.Mesh(tp=2))
    real = infer.trace
    monkeypatch.setattr("functional_par.plan.trace", lambda *args: calls.append(1) or real(*args))
    batch = {"x": ((3, 6, 6), torch.float64), "ids": ((3, 6), torch.int64)}
    threads = [threading.Thread(target=plan.trace, args=(batch,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_plans_made_from_each_other_trace_again_only_what_differs(monkeypatch):
    calls = []
    real = infer.trace
    monkeypatch.setattr("functional_par.plan.trace", lambda *args: calls.append(1) or real(*args))
    plan = program_of(model_of(Equal(True), MLP)).plan(fp.Mesh(tp=2))
    batch = {"x": ((3, 6, 6), torch.float64), "ids": ((3, 6), torch.int64)}
    first = plan.trace(batch)
    calls.clear()
    assert dataclasses.replace(plan, microbatches=7, precision=None).trace(batch) is first
    assert not calls
    other = dataclasses.replace(plan, mode=fp.TensorParallelMode.REDUCE_SCATTER)
    longer = {"x": ((4, 6, 6), torch.float64), "ids": ((4, 6), torch.int64)}
    for changed in (lambda: plan.trace(longer), lambda: plan.trace(batch, torch.float64), lambda: other.trace(batch)):
        calls.clear()
        assert changed() is not first
        assert calls
    same = dataclasses.replace(plan.model)
    calls.clear()
    assert dataclasses.replace(plan, model=same).trace(batch) is not first
    assert calls
    calls.clear()
    assert plan.with_model(same).trace(batch) is first
    assert not calls
