"""One pipeline stage: its layers as calls that return a pullback, with everything static worked out once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from functional_par.capture import Capture
from functional_par.errors import ModelError
from functional_par.model import LOSS, Layer
from functional_par.pipeline.back import Again, Back, Backward, Uses
from functional_par.pipeline.compiled import Compiler
from functional_par.pipeline.products import NONE, SELECTIVE, Products
from functional_par.pipeline.routes import routes
from functional_par.plan import Plan
from functional_par.run_par import RunPar
from functional_par.trace import Abstract, Trace
from functional_par.vjp import Engine, Pull, undifferentiated


@dataclass(frozen=True)
class Edge:
    """The value between two layers: a pytree of tensors, some of which carry a cotangent back."""

    leaves: tuple[Abstract, ...]
    structure: Any
    differentiable: tuple[bool, ...]

    @classmethod
    def of(cls, value: Any) -> Edge:
        """The edge of a traced value."""
        leaves, structure = pytree.tree_flatten(value)
        return cls(tuple(leaves), structure, tuple(leaf.value.grad for leaf in leaves))

    def without(self, places: frozenset[int]) -> Edge:
        """The same, in which no cotangent goes through some of the leaves."""
        return replace(self, differentiable=tuple(d and i not in places for i, d in enumerate(self.differentiable)))


@dataclass(frozen=True)
class Call:
    """One layer, ready to run.

    Attributes:
        trainable, frozen: its leaves.
        before, after: what goes in and comes out.
        shared: the leaves that other layers read too.
        policy: what is kept of its forward, see ``functional_par.transforms.remat``.
        touched: the leaves of its input that it computes with.
        uses: what is known of how it uses its leaves.
    """

    layer: Layer
    trainable: tuple[str, ...]
    frozen: tuple[str, ...]
    before: Edge
    after: Edge
    shared: frozenset[str] = frozenset()
    policy: str = NONE
    touched: frozenset[int] = frozenset()
    uses: Uses = field(default_factory=Uses, compare=False)

    def forward(
        self, engine: Engine, leaves: Mapping[str, Tensor], x: Sequence[Tensor], par: RunPar
    ) -> tuple[list[Tensor], Backward]:
        """Run the layer on the flat leaves of its input; returns those of its output, and its backward."""
        again = self.policy != NONE and engine is not undifferentiated and any(self.after.differentiable)
        if not again:
            return self._run(engine, leaves, par, x)
        products = Products(self.layer.name) if self.policy == SELECTIVE else None
        # By the same engine as the second run, so that torch chooses the same kernels in both.
        with nullcontext() if products is None else products.recording():
            outputs, _ = self._run(engine, leaves, par, x)
        inputs = tuple(leaf if i in self.touched else _stand_in(leaf) for i, leaf in enumerate(x))
        return outputs, Again(inputs, self.touched, partial(self._run, engine, leaves, par), products)

    def _run(
        self, engine: Engine, leaves: Mapping[str, Tensor], par: RunPar, x: Sequence[Tensor]
    ) -> tuple[list[Tensor], Back]:
        if isinstance(engine, Compiler):
            return self._run_compiled(engine, leaves, par, x)
        capture, hidden = Capture({path: leaves[path] for path in self.trainable}), self.uses.hidden
        names = () if hidden is None else tuple(path for path in self.trainable if path not in hidden)
        n, kept = len(names), {path: leaves[path] for path in self.layer.paths}
        par = par.within(self.layer.name, capture)

        def function(*primals: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            own = dict(zip(names, primals, strict=False))
            if hidden is None and capture.raw and torch.is_grad_enabled():
                own = capture.watched(primals[-1])
            inputs = pytree.tree_unflatten(_weave(self.before.differentiable, primals[n:], x), self.before.structure)
            with capture.forward({**capture.raw, **own}, primals[-1] if capture.raw else None):
                y = self.layer.fn(self.layer.select(kept | own), inputs, par)
            if torch.is_grad_enabled():
                self.uses.check(self.layer.name, capture)
            return self._split(y)

        primals = [leaves[path] for path in names]
        primals += [leaf for leaf, grad in zip(x, self.before.differentiable, strict=True) if grad]
        inputs = len(primals) - n
        primals += [leaf.new_zeros(()) for leaf in list(capture.raw.values())[:1]]  # the token of what is captured
        if not any(self.after.differentiable):  # nothing flows back, and torch.func.vjp wants an output
            outputs, aux, _ = engine(lambda: function(*primals))
            pull: Pull = partial(_zeros, primals)
        else:
            outputs, aux, pull = engine(function, *primals)
        learning = self.uses if hidden is None else None
        return _join(self.after.differentiable, outputs, aux), Back(names, inputs, self.shared, pull, capture, learning)

    def _run_compiled(
        self, engine: Compiler, leaves: Mapping[str, Tensor], par: RunPar, x: Sequence[Tensor]
    ) -> tuple[list[Tensor], Back]:
        """The same with the layer's compiled function, of which nothing is captured."""
        names, n = self.trainable, len(self.trainable)
        frozen, compiled = {path: leaves[path] for path in self.frozen}, engine.layer(self.layer.fn, par)

        def function(*primals: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            own = dict(zip(names, primals, strict=False))
            inputs = pytree.tree_unflatten(_weave(self.before.differentiable, primals[n:], x), self.before.structure)
            return self._split(compiled(self.layer.select(frozen | own), inputs, dict(par.batch)))

        primals = [leaves[path] for path in names]
        primals += [leaf for leaf, grad in zip(x, self.before.differentiable, strict=True) if grad]
        outputs, aux, pull = engine(function, *primals)
        back = Back(names, len(primals) - n, self.shared, pull, Capture({}), None)
        return _join(self.after.differentiable, outputs, aux), back

    def _split(self, y: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Separate the outputs that carry a cotangent from those that do not, checking what the trace promised."""
        flat, structure = pytree.tree_flatten(y)
        flat = [leaf if isinstance(leaf, Tensor) else torch.tensor(leaf) for leaf in flat]
        if structure != self.after.structure:
            raise ModelError(
                f"layer {self.layer.name!r} returned the structure {structure}, but {self.after.structure} when it was traced; "
                "a layer's output has the same structure at every call."
            )
        for leaf, expected in zip(flat, self.after.leaves, strict=True):
            if tuple(leaf.shape) != expected.shape or leaf.dtype != expected.dtype:
                raise ModelError(
                    f"layer {self.layer.name!r} returned {leaf.dtype}{list(leaf.shape)}, but {expected.dtype}"
                    f"{list(expected.shape)} when it was traced; shapes are static."
                )
        pairs = list(zip(flat, self.after.differentiable, strict=True))
        return [leaf for leaf, grad in pairs if grad], [leaf for leaf, grad in pairs if not grad]


def stage_calls(plan: Plan, traced: Trace, stage: int) -> tuple[Call, ...]:
    """The calls of one stage in order; the loss is the last call of the last stage.

    Raises:
        ModelError: for microbatches of this shape and dtype gradients owe something else than the plan says.
    """
    _check_debts(plan, traced)
    calls: list[Call] = []
    readers = Counter(path for layer in plan.model.all_layers for path in layer.paths)
    before, idle = Edge.of(dict(traced.batch)), frozenset[int]()
    for layer in plan.model.all_layers:
        entry = traced.layers[layer.name]
        after = loss_edge(traced) if layer.name == LOSS else Edge.of(entry.output)
        if plan.stage_of[layer.name] == stage:
            if not calls:
                idle = frozenset(i for i, origin in enumerate(routes(plan, traced).inputs[stage]) if origin is None)
            through = frozenset(j for j, i in enumerate(entry.passed) if i in idle)
            trainable = tuple(path for path in layer.paths if plan.specs[path].trainable)
            frozen = tuple(path for path in layer.paths if not plan.specs[path].trainable)
            shared = frozenset(path for path in trainable if readers[path] > 1)
            edges = before.without(idle), after.without(through)
            kept = plan.remat.get(layer.name, NONE), entry.touched
            calls.append(Call(layer, trainable, frozen, *edges, shared, *kept))
            idle = through
        before = after
    return tuple(calls)


def _check_debts(plan: Plan, traced: Trace) -> None:
    for path, spec in plan.specs.items():
        planned = [debt.axis for debt in spec.owes if debt.axis != "pp"]
        found = [debt.axis for debt in traced.debts[path]]
        if planned != found:
            shapes = ", ".join(f"{name} {list(leaf.shape)}" for name, leaf in traced.batch.items())
            raise ModelError(
                f"the gradient of {path} owes a sum over {'+'.join(found) or 'nothing'} for microbatches of {shapes}, but over "
                f"{'+'.join(planned) or 'nothing'} by the plan, which was made with other sizes: a layer communicates or not "
                "depending on the shape or dtype. Let it do the same for every size."
            )


def loss_edge(traced: Trace) -> Edge:
    """Of the pair (sum, count) only the sum is differentiated."""
    total, count = traced.layers[LOSS].output
    if not isinstance(count, Abstract):
        count = Abstract((), torch.tensor(count).dtype)
    leaves, structure = pytree.tree_flatten((total, count))
    return Edge(tuple(leaves), structure, (True, False))


def _stand_in(x: Tensor) -> Tensor:
    """A tensor of the same shape that takes no memory, for what a layer hands on or drops."""
    return x.new_zeros(()).expand(x.shape)


def _zeros(primals: Sequence[Tensor], cotangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch.zeros_like(primal) for primal in primals)


def _weave(differentiable: Sequence[bool], primals: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
    """The input's leaves, those that are differentiated replaced by the primals."""
    supply = iter(primals)
    return [next(supply) if grad else leaf for leaf, grad in zip(x, differentiable, strict=True)]


def _join(differentiable: Sequence[bool], outputs: Sequence[Tensor], aux: Sequence[Tensor]) -> list[Tensor]:
    first, second = iter(outputs), iter(aux)
    return [next(first) if grad else next(second) for grad in differentiable]
