"""Layers under torch.compile: the same training, and what it cannot do is refused."""

from __future__ import annotations

import pytest
import torch

import functional_par as fp
from functional_par import ModelError, ParallelError
from functional_par.tree import flatten

from ..toys import small_gpt

# aot_eager takes a layer apart into forward and backward as inductor does, and needs no C++ compiler.
ENGINE = "compile:aot_eager"


def trained(program, mesh, engine, steps=2):
    tokens = torch.randint(0, 8, (4, 5), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": tokens[:, :4], "labels": tokens[:, 1:]}

    def main(world):
        step = program.step(world, fp.optim.adamw(1e-2), clip=1.0, dtype=torch.float64, engine=engine)
        state, metrics = step.init(0), []
        for _ in range(steps):
            state, found = step(state, batch)
            metrics.append(found)
        return metrics, step.evaluate(state, batch), flatten(step.gather(state))

    return fp.run(main, mesh)[0]


# Torch's own, where it looks at what is between two compiled pieces.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.mark.parametrize(
    "mesh",
    [fp.Mesh(), *(pytest.param(mesh, marks=pytest.mark.deep) for mesh in (fp.Mesh(tp=2), fp.Mesh(dp=2, pp=2)))],
    ids=str,
)
def test_compiled_layers_train_the_same(mesh):
    program = fp.compose(fp.shard_tp("REDUCE_SCATTER"), fp.stage_pp("zb-1p", 2), fp.dp_reduce(), fp.remat("full"))(
        small_gpt(blocks=1)
    )
    (metrics, loss, leaves), (expected, true_loss, reference) = (
        trained(program, mesh, engine) for engine in (ENGINE, "tape")
    )
    for found, true in zip([*metrics, loss], [*expected, true_loss], strict=True):
        assert found == pytest.approx(true, abs=1e-12)
    for path, leaf in reference.items():
        assert (leaves[path] - leaf).abs().max() < 1e-11


def test_a_backend_that_torch_does_not_have_is_refused():
    with pytest.raises(
        ParallelError, match=r"engine 'compile:icc': torch\.compile has no backend 'icc'; it has .*inductor"
    ):
        trained(fp.compose()(small_gpt(blocks=1)), fp.Mesh(), "compile:icc")


def test_random_numbers_are_refused():
    model = fp.models.gpt(vocab=8, d_model=4, n_layers=1, n_heads=1, seq_len=4, dropout=0.5)
    with pytest.raises(ModelError, match=r"a layer draws random numbers, which compiled layers cannot"):
        trained(fp.compose()(model), fp.Mesh(), ENGINE)
