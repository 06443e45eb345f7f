"""Running a stage's part of a schedule."""

from __future__ import annotations

import pytest
import torch

import functional_par as fp
from functional_par import Mesh, MismatchError, ModelError, ScheduleError
from functional_par.pipeline.buffers import Buffers
from functional_par.pipeline.execute import Executor
from functional_par.pipeline.part import make_part
from functional_par.pipeline.recording import Recording
from functional_par.pipeline.runner import MOST_SHAPES
from functional_par.run_par import RunPar
from functional_par.tree import flatten
from functional_par.vjp import engine, undifferentiated

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
        seen, ended, recording = [], [], Recording()

        class Gradients:
            def add(self, grads):
                seen.append({path: grad.clone() for path, grad in grads.items()})

            def done(self, paths):
                ended.append(tuple(paths))

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
        assert ended == [tuple(grads) for grads in seen]
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


def test_ranks_of_one_pipeline_whose_batches_differ_in_shape_are_told_so_in_the_first_step():
    program = fp.compose(fp.stage_pp("1f1b", 3, split=SPLIT))(odd())

    def main(world):
        step = program.step(world, fp.optim.sgd(lr=0.1), dtype=torch.float64)
        step(step.init(0), token_batch(VOCAB, 6 if world.rank == 1 else 3, 4))

    message = r"rank \d has other shapes between stages than ranks? .* of its pipeline: stage 0: float64\[\d, 4, 6\]"
    with pytest.raises(MismatchError, match=message):
        fp.run(main, Mesh(pp=3), timeout=10.0)


def test_backwards_need_a_place_for_gradients_and_an_evaluation_has_no_pullback():
    plan = fp.compose(fp.stage_pp("1f1b", 3))(odd()).plan(Mesh())
    params = flatten(plan.model.init(0, torch.float64))

    def main(world):
        part, buffers = make_part(plan, world, MICRO, torch.float64), Buffers(torch.device("cpu"), poison=False)
        one = torch.tensor(1.0, dtype=torch.float64)
        Executor(part, world, buffers, engine("func"), lambda i: RunPar(batch=microbatch(i)), params, one, None).run()

    with pytest.raises(ScheduleError, match="a schedule with backwards was given where nothing takes the gradients"):
        fp.run(main, Mesh())
    outputs, _, pull = undifferentiated(lambda x: ([x * 2], []), torch.ones(2, requires_grad=True))
    assert not outputs[0].requires_grad
    with pytest.raises(ModelError, match="computed without a derivative"):
        pull(outputs)


def test_an_evaluation_keeps_nothing_and_leaves_the_next_step_as_it_was():
    program = fp.compose(fp.stage_pp("zbv", 3, [1, 1, 1, 2]))(odd())

    def main(world):
        step = program.step(world, fp.optim.adamw(1e-2), dtype=torch.float64, donate=True)
        state = step.init(0)
        losses = [step.evaluate(state, BATCH) for _ in range(2)]
        state, metrics = step(state, BATCH)
        return losses, metrics, step.evaluate(state, BATCH), step.runner.buffers.made

    (losses, metrics, after, made), (other, _, _, _) = fp.run(main, Mesh(pp=2), timeout=20.0)
    assert losses[0] == losses[1] == other[0]
    assert losses[0]["loss"] == metrics["loss"]
    assert losses[0]["tokens"] == metrics["tokens"]
    assert after["loss"] < metrics["loss"]
    assert made <= 12


def test_of_many_shapes_of_microbatches_the_last_few_are_kept_ready():
    program = fp.compose(fp.stage_pp("1f1b", 2, SPLIT))(odd())

    def main(world):
        step = program.step(world, fp.optim.sgd(lr=0.1), dtype=torch.float64)
        state, made = step.init(0), []
        for seq in [*range(2, 14), *range(2, 14)]:
            state, _ = step(state, token_batch(VOCAB, 4, seq))
            made.append((len(step.runner._parts), step.runner.buffers.made))
        return made

    for made in fp.run(main, Mesh(pp=3), timeout=30.0):
        parts, buffers = zip(*made, strict=True)
        assert max(parts) == MOST_SHAPES
        assert max(buffers[12:]) <= max(buffers[:12])
