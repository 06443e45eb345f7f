"""What each layer of a model costs on this machine: measured one layer at a time, in one process, on one thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from functional_par.errors import CompositionError
from functional_par.mesh import Mesh
from functional_par.model import Model
from functional_par.pipeline.layer_costs import LayerCosts
from functional_par.pipeline.rounds import Rounds
from functional_par.pipeline.stage import stage_calls
from functional_par.pipeline.told import check_shapes, shapes_of
from functional_par.plan import Fields, Plan
from functional_par.program import Program, compose
from functional_par.run_par import RunPar


def measure(
    model: Model | Program,
    batch: Mapping[str, Tensor] | Mapping[str, Sequence[int]],
    dtype: torch.dtype | None = None,
    engine: str = "func",
    rounds: int = 3,
) -> LayerCosts:
    """Time forward and backward of every layer on a microbatch: the median of several rounds through the whole model.

    Layers of one function and one set of shapes are timed once a round. Parameters of different layers and the activations of
    one layer are in memory at a time.

    Args:
        model: a model, or a program, whose ties are applied.
        batch: a microbatch, or the shape of each of its fields, to be filled with random numbers.
        dtype: of parameters and activations; by default as ``fp.precision`` of the program says, else float32.
        engine: as for ``program.step``.
        rounds: how often each layer is timed, after one run that is not.

    Raises:
        CompositionError: neither a model nor a program, fields or shapes that the model does not take, or fewer than one round.
    """
    plan = _plan(model)
    dtype = plan.precise(dtype, "measure").compute
    fields = _microbatch(plan.model, batch, dtype)
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise CompositionError(f"measure(rounds={rounds!r}): it is an integer of at least 1.")
    shapes: Fields = {name: (tuple(x.shape), x.dtype) for name, x in fields.items()}
    calls = stage_calls(plan, plan.trace(shapes, dtype), 0)
    run = Rounds(plan, calls, RunPar().with_batch(fields), dtype)
    with _one_thread():
        saved = run.saved()
        times = [run.seconds(engine) for _ in range(rounds)]
    forward, first, second = ({name: median(each[name][i] for each in times) for name in saved} for i in range(3))
    return LayerCosts(forward, first, second, saved, shapes_of(fields), dtype)


def _plan(model: Any) -> Plan:
    if isinstance(model, Model):
        model = compose()(model)
    if not isinstance(model, Program):
        raise CompositionError(f"measure({type(model).__name__}): give an fp.Model or a program of fp.compose.")
    whole = model.plan(Mesh())
    if len(whole.stages) > 1:
        whole = replace(compose()(model.model).plan(Mesh()), remat=whole.remat, precision=whole.precision)
    return whole


def _microbatch(model: Model, batch: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """The fields as tensors, those given by shape drawn."""
    check_shapes(model, shapes_of(batch), "measure")
    known = model.batch or {}
    result = {}
    for name, given in batch.items():
        if isinstance(given, Tensor):
            result[name] = given.to(dtype) if given.is_floating_point() else given
            continue
        shape, kind = tuple(given), known[name].dtype
        generator = torch.Generator().manual_seed(len(result))
        if kind.is_floating_point:
            result[name] = torch.randn(shape, generator=generator).to(dtype)
        else:
            result[name] = torch.randint(known[name].high or 2, shape, generator=generator).to(kind)
    return result


@contextmanager
def _one_thread() -> Iterator[None]:
    """As the ranks of a machine run that have a core each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
