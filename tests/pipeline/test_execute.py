"""Running a stage's part of a schedule."""

from __future__ import annotations

import torch

import functional_par as fp
from functional_par import Mesh
from functional_par.pipeline.buffers import Buffers
from functional_par.pipeline.execute import Executor
from functional_par.pipeline.part import make_part
from functional_par.pipeline.recording import Recording
from functional_par.run_par import RunPar
from functional_par.tree import flatten
from functional_par.vjp import engine

from ..oracle import close, gradients, token_batch
from ..toys import VOCAB, odd

BATCH = token_batch(VOCAB, 6, 4)
MICRO = {name: ((2, 4), x.dtype) for name, x in BATCH.items()}


def microbatch(i):
    return {name: x[2 * i : 2 * i + 2] for name, x in BATCH.items()}


def execute(mesh, schedule, split):
    """Gradients as they are handed over, the losses, and what each rank was doing with how many pullbacks in hand."""
    program = fp.compose(fp.stage_pp(schedule, 3, split=split))(odd())
    plan = program.plan(mesh)
    params = flatten(program.model.init(0, torch.float64))

    def main(world):
        seen, recording = [], Recording()

        class Gradients:
            def add(self, grads):
                seen.append({path: grad.clone() for path, grad in grads.items()})

        executor = Executor(
            make_part(plan, world, MICRO, torch.float64),
            world,
            Buffers(torch.device("cpu"), poison=False),
            engine("func"),
            lambda i: RunPar(batch=microbatch(i)),
            {path: params[path] for path in plan.held(world.coords.pp)},
            torch.tensor(1.0, dtype=torch.float64),
            Gradients(),
            recording,
        )
        losses = executor.run()
        assert executor.live == {}
        return seen, losses, recording.peak

    return params, fp.run(main, mesh, timeout=30.0)


SPLIT = [2, 2, 1]
PROGRAM = fp.compose(fp.stage_pp(split=SPLIT))(odd())


def expected(params):
    """Gradient of the loss sum of each microbatch."""
    for i in range(3):
        loss, grads = gradients(PROGRAM.model, params, microbatch(i))
        count = PROGRAM.model.count_terms(microbatch(i))
        yield loss * count, {path: grad * count for path, grad in grads.items()}


def test_every_layer_hands_over_its_gradients_in_reverse_microbatches_first_in_first_out():
    for schedule in ("1f1b", "afab"):
        params, ranks = execute(Mesh(pp=3), schedule, SPLIT)
        names = [["look_up", "mask"], ["hidden0", "join"], ["head", "loss"]]
        reads = {layer.name: layer.paths for layer in PROGRAM.model.all_layers}
        for stage, (seen, losses, _) in enumerate(ranks):
            order = [reads[name] for _ in range(3) for name in reversed(names[stage])]
            assert [tuple(grads) for grads in seen] == order
            for i, (_, grads) in enumerate(expected(params)):
                for handed in seen[2 * i : 2 * i + 2]:
                    for path, grad in handed.items():
                        close(grad, grads[path], f"{path} of microbatch {i}")
            assert len(losses) == (3 if stage == 2 else 0)
        for (total, count), (want, _), i in zip(ranks[2][1], expected(params), range(3), strict=True):
            close(total, want)
            assert count == PROGRAM.model.count_terms(microbatch(i))


def test_1f1b_holds_the_pullbacks_of_as_many_microbatches_as_stages_follow():
    _, ranks = execute(Mesh(pp=3), "1f1b", SPLIT)
    assert [most for _, _, most in ranks] == [3, 2, 1]
    _, ranks = execute(Mesh(pp=3), "afab", SPLIT)
    assert [most for _, _, most in ranks] == [3, 3, 3]


def test_one_stage_alone_sends_nothing():
    _, ((seen, losses, _),) = execute(Mesh(), "1f1b", None)
    assert len(seen) == 3 * 6
    assert len(losses) == 3
