"""Parameters that are gathered and freed: whatever a layer does with their memory, nothing reads it when it is gone."""

from __future__ import annotations

import pytest
import torch

import functional_par as fp
from functional_par import Input, Mesh, Model, Param, tree
from functional_par.comm.base import AllReduce, Group
from functional_par.zero.gathered import Lent

from ..oracle import adamw, close
from ..toys import WIDE

WIDTH, ROWS = 4, 12
MESH = Mesh(dp=3, tp=2)


class Given(torch.autograd.Function):
    """A sum whose cotangent is made of the weight's own memory. No derivative, but the same with and without gathering."""

    @staticmethod
    def forward(x, weight):
        return x + weight

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, cotangent):
        (weight,) = ctx.saved_tensors
        return weight.expand_as(cotangent), cotangent.sum(0)


def leaking():
    """Layers whose outputs are views of weights, that send weights as they are, that give weights to a kernel as its input,
    whose gradient waits for W, and whose cotangents are weights."""

    def table(p, batch, par):
        return {"rows": p["rows"].expand(len(batch["x"]), WIDTH), "x": batch["x"] * 1.0}

    def sent(p, s, par):
        w = par.all_gather(p["w"], "tp", 0, to="replicated")
        return s | {"x": s["x"] * w[:WIDTH] + w[WIDTH:]}

    def kernel(p, s, par):
        y = fp.nn.column_linear(p["w"], p["m"], par)  # [2, hidden]
        return s | {"x": s["x"] + par.psum(y.sum(), "tp")}

    def given(p, s, par):
        return s | {"x": Given.apply(s["x"], p["w"])}

    def loss(p, s, par):
        return ((s["x"] + s["rows"]) * par.batch["y"]).square().sum(), torch.tensor(len(s["x"]))

    params = {
        "table": {"rows": Param((WIDTH,), "out", WIDE)},
        "sent": {"w": Param((2 * WIDTH,), "ffn", WIDE)},
        "kernel": {"w": Param((2, WIDTH), "in out", WIDE), "m": Param((8, WIDTH), "ffn out", WIDE)},
        "given": {"w": Param((WIDTH,), "out", WIDE)},
    }
    layers = [
        ("table", "table", table),
        ("sent", "sent", sent),
        ("kernel", "kernel", kernel),
        ("given", "given", given),
    ]
    batch = {"x": Input((None, WIDTH), torch.float64), "y": Input((None, WIDTH), torch.float64)}
    return Model(params, layers, loss, batch)


@pytest.mark.parametrize("engine", ["func", "tape"])
def test_what_layers_make_of_the_memory_of_weights_stays(engine):
    found = {}
    for zero in (0, 3):
        parts = fp.shard_tp(), fp.stage_pp("zb-h1", 2), fp.dp_reduce(zero=zero)
        program = fp.compose(*parts)(leaking())

        def main(world, program=program):
            step = program.step(world, fp.optim.sgd(0.01), dtype=torch.float64, engine=engine, poison=True)
            state = step.init(0)
            for seed in (0, 1):
                generator = torch.Generator().manual_seed(seed)
                x, y = (torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
                state, _ = step(state, {"x": x, "y": y})
            return tree.flatten(step.gather(state))

        found[zero] = fp.run(main, MESH, backend="threads", timeout=60.0)[0]
    for path, x in found[0].items():
        close(found[3][path], x, path)


class Noted(Group):
    """Keeps what it was sent."""

    def __init__(self):
        self.label, self.ranks, self.index, self.sent = "tp", (0, 1), 0, []

    def start(self, op, x, *, donate=False):
        self.sent.append(x)


def test_a_weight_that_is_sent_to_another_thread_is_copied_and_nothing_else():
    program = fp.compose(fp.shard_tp(), fp.dp_reduce(zero=3))(leaking())

    def main(world):
        step = program.step(world, adamw(), dtype=torch.float64)
        gathered, group, data = step.runner.gathered, Noted(), torch.ones(3)
        gathered.begin(step.init(0).flat, ["sent"])
        gathered.enter("sent")
        weight = gathered.leaves["sent.w"]
        for x in (weight[1:], data):
            Lent(group, gathered).start(AllReduce(), x)
        copy, same = group.sent
        assert torch.equal(copy, weight[1:])
        assert copy.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()
        assert same.data_ptr() == data.data_ptr()
        assert all(isinstance(each, Lent) for each in step.par.groups.values())
        assert step.par.groups

    fp.run(main, Mesh(dp=2), backend="threads")
