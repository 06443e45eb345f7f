"""What each of eight processes does in test_processes.py: three steps in every layout, and every collective once;
each writes what came out."""

import functools
import sys
from pathlib import Path

import torch

import functional_par as fp
from functional_par import tree
from tests import oracle
from tests.properties.test_collectives import on_rank
from tests.spawn import spawn
from tests.test_layouts import CLIP, SEQ, VOCAB, Case, model_of, transforms

CASES = (
    Case(2, 2, 2, "REDUCE_SCATTER", True, "zbv", 3, True, "gpt", zero=3),
    Case(1, 2, 4, "ALL_REDUCE", True, "afab", 4, True, "gpt"),
    Case(1, 8, 1, None, None, "zb-h1", 3, True, "gpt"),
    Case(1, 1, 8, "REDUCE_SCATTER", False, None, 1, False, "gpt"),
    Case(2, 4, 1, None, None, "1f1b", 4, False, "llama", zero=1),
)
ROWS, STEPS = 24, 3
AXES, SEED = ("tp", "dp"), 1


@functools.cache
def batches() -> list[dict[str, torch.Tensor]]:
    return [oracle.token_batch(VOCAB, ROWS, SEQ, seed) for seed in range(STEPS)]


@functools.cache
def program_of(case: Case) -> fp.Program:
    """Made before the ranks are: they are forks, so each would make just the same."""
    program = fp.compose(*transforms(case))(model_of(case.model, case.pp))
    plan = program.plan(fp.Mesh(dp=case.dp, pp=case.pp, tp=case.tp))
    plan.trace(dict.fromkeys(("tokens", "labels"), ((ROWS // plan.pieces, SEQ), torch.int64)), torch.float64)
    return program


def train(case: Case, folder: Path) -> None:
    program = program_of(case)
    mesh = fp.Mesh(dp=case.dp, pp=case.pp, tp=case.tp)

    def main(world: fp.World) -> None:
        step = program.step(world, oracle.adamw(), clip=CLIP, dtype=torch.float64, donate=True)
        state, seen = step.init(0), []
        for batch in batches():
            state, metrics = step(state, batch)
            seen.append([metrics["loss"], metrics["grad_norm"], metrics["tokens"]])
        weights = tree.flatten(step.gather(state))
        own = {path: x for path, x in state.flat.items() if path == "embed.weight" and case.tied}
        # Every collective over four of the eight, of random shapes, where the mesh has such a group.
        exchanged = on_rank(world, AXES, SEED) if case == CASES[0] else None
        saved = {"seen": seen, "weights": weights, "own": own, "exchanged": exchanged}
        torch.save(saved, folder / f"{case}.{world.rank}.pt")

    fp.run(main, mesh)


def main() -> None:
    for case in CASES:
        train(case, Path(sys.argv[1]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in CASES:
        program_of(case)
    sys.exit(spawn(8, main))
