"""A training run writes the timeline of the step that it is asked for, and of no other."""

import torch

import functional_par as fp
from functional_par.report.chrome_trace import load
from functional_par.report.replay import replay
from functional_par.report.step_trace import row_labels, traced


def config(path, engine):
    return fp.Config.from_dict(
        {
            "parallelism": {"pp": 2, "dp": 2, "pp_engine": engine},
            "tokens": {"sequence_length": 4, "train_steps": 3, "global_batch_size": 4, "microbatches": 2},
            "model": {"d_model": 8, "n_layers": 2, "n_heads": 2, "vocab": 16},
            "logging": {"trace_file": path},
        }
    )


def test_the_step_that_is_asked_for_is_written_with_all_ranks(tmp_path):
    path = str(tmp_path / "t.json")
    given = config(path, "1f1b")
    program = given.program()
    tokens = torch.arange(16).reshape(4, 4)
    batch = {"tokens": tokens, "labels": tokens}

    def main(world):
        step, found = program.step(world, given.optimizer()), []
        state = step.init(0)
        for number in (1, 2, 3):
            with traced(world, given, number) as recording:
                state, _ = step(state, batch, recording)
            found.append(recording is not None)
        return found

    assert fp.run(main, given.mesh()) == [[False, True, False]] * 4
    trace = load(path)
    assert (trace.schedule, trace.pp, trace.microbatches, trace.timeline.unit) == ("1f1b", 2, 2, "s")
    assert trace.labels == row_labels(given.mesh()) == tuple(f"rank {r}: pp {r // 2}, dp {r % 2}" for r in range(4))
    found = replay(trace.timeline, "1f1b")
    assert found.homes == (0, 0, 1, 1)
    assert str(found.schedule) == "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"


def test_one_rank_has_no_place():
    assert row_labels(fp.Mesh()) == ("rank 0",)
