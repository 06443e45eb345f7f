"""The same model, whose layers record what they do when they run; while they are traced nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from functional_par import tree
from functional_par.audit.functions import find_functions
from functional_par.audit.operations import Operations
from functional_par.audit.par import RecordingPar
from functional_par.audit.record import NOWHERE, LayerLog, Recorder, keep, tensors_in
from functional_par.model import Layer, Model
from functional_par.par import Par
from functional_par.plan import Plan
from functional_par.run_par import RunPar


def instrument_plan(plan: Plan, recorder: Recorder) -> Plan:
    """The plan whose layers record. What has been traced stays known: the functions are the same."""
    return plan.with_model(instrument(plan.model, recorder))


def instrument(model: Model, recorder: Recorder) -> Model:
    """The model whose layers record."""
    layers = [replace(layer, fn=Recorded(layer.fn, layer, recorder)) for layer in model.all_layers]
    return replace(model, layers=tuple(layers[:-1]), loss=layers[-1])


@dataclass(frozen=True, eq=False)
class Recorded:
    """A layer function that records its calls."""

    __wrapped__: Callable[..., Any]
    layer: Layer
    recorder: Recorder

    def __call__(self, params: Any, x: Any, par: Par) -> Any:
        if not isinstance(par, RunPar):
            return self.__wrapped__(params, x, par)
        log = self.recorder.log(self.layer.name, par.first_row)
        params, x = self._params(log, params), self._input(log, x)
        stops = tensors_in((params, x))
        out = self._recorded(log, params, x, par) if log.deep else self.__wrapped__(params, x, par)
        outputs = tensors_in(out)
        log.functions = find_functions(outputs, stops)
        if self.recorder.keeps_arguments and log.functions:
            log.arguments = params, x, par
        log.finish(outputs)
        return out

    def _recorded(self, log: LayerLog, params: Any, x: Any, par: RunPar) -> Any:
        own = RecordingPar(par, log)
        for name, given in par.batch.items():
            log.note(f"batch {name}", given, place=NOWHERE)
        for name, leaf in self._leaves(params).items():
            log.note(f"leaf {name}", leaf, place=NOWHERE)
        for given in tensors_in(x):
            log.note("input", given, place=NOWHERE)
        with Operations(log):
            return self.__wrapped__(params, x, own)

    def _leaves(self, params: Any) -> dict[str, Tensor]:
        """Paths in the model to the tensors that the layer receives."""
        if isinstance(params, Tensor):
            return {self.layer.reads[0].path: params}
        local = tree.flatten(params)
        return {read.path: local[read.local] for read in self.layer.reads}

    def _params(self, log: LayerLog, params: Any) -> Any:
        if isinstance(params, Tensor):
            return keep(log.params, self.layer.reads[0].path, params)
        local = tree.flatten(params)
        paths = {read.local: read.path for read in self.layer.reads}
        return tree.unflatten({name: keep(log.params, paths[name], leaf) for name, leaf in local.items()})

    def _input(self, log: LayerLog, x: Any) -> Any:
        leaves, structure = pytree.tree_flatten(x)
        kept = [keep(log.inputs, i, leaf) if isinstance(leaf, Tensor) else leaf for i, leaf in enumerate(leaves)]
        return pytree.tree_unflatten(kept, structure)
