"""``compose``: transforms on a model make a program; a program and a mesh make a plan; a plan and a world make a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from functional_par.errors import CompositionError, MeshError
from functional_par.mesh import Mesh
from functional_par.model import Model
from functional_par.plan import Plan
from functional_par.transforms.base import Transform

if TYPE_CHECKING:
    from functional_par.comm.base import World
    from functional_par.optim import Optimizer
    from functional_par.report.explain import Explanation
    from functional_par.step import Step


@dataclass(frozen=True)
class Program:
    """A model under transforms. Make it with ``compose``.

    Attributes:
        source: the model as written, its leaves replaced by those of ``reparam``.
        transforms: in the order given. It has no effect, except between several ``reparam`` and between several maps on
            gradients or updates in one phase, which run in this order.
    """

    source: Model
    transforms: tuple[Transform, ...]
    _plans: dict[Mesh, Plan] = field(default_factory=dict, compare=False, repr=False)
    _lock: Any = field(default_factory=RLock, compare=False, repr=False)

    @property
    def model(self) -> Model:
        """The model with its ties: the single-process reference of this program."""
        return self.plan(Mesh()).model

    @property
    def exact(self) -> Program:
        """The same without ``precision``, which rounds on purpose: for proofs in float64."""
        kept = tuple(each for each in self.transforms if _name(type(each)) != "precision")
        return self if len(kept) == len(self.transforms) else Program(self.source, kept)

    def plan(self, mesh: Mesh) -> Plan:
        """Everything that follows from the mesh, before any communication.

        Raises:
            ParallelError: whatever is wrong with the composition on this mesh; see ``functional_par.errors``.
        """
        if not isinstance(mesh, Mesh):
            raise MeshError(f"a plan for {mesh!r}: give an fp.Mesh, such as fp.Mesh(dp=2, tp=2).")
        with self._lock:
            if mesh not in self._plans:
                self._plans[mesh] = self._make_plan(mesh)
            return self._plans[mesh]

    def _make_plan(self, mesh: Mesh) -> Plan:
        costs = {} if mesh == Mesh() else self.plan(Mesh()).costs
        plan = Plan.start(self.source, mesh, costs)
        for transform in self.transforms:
            plan = transform(plan)
        plan = plan.finish()
        for transform in self.transforms:
            transform.check(plan)
        return plan

    def explain(self, mesh: Mesh, batch: Mapping[str, Tensor | Sequence[int]] | None = None) -> Explanation:
        """What lies where, what is owed and who pays: a table to print.

        Args:
            mesh: axis sizes.
            batch: a microbatch, or the shape of each of its fields, by which activations are counted; by default that of
                ``stage_pp(memory=fp.MemoryBound(batch=...))`` or ``stage_pp(costs=fp.measure(...))``, else one row.

        Raises:
            CompositionError: fields or shapes that the model does not take.
        """
        from functional_par.report.explain import explain

        return explain(self.plan(mesh), batch)

    def step(
        self,
        world: World,
        optimizer: Optimizer,
        clip: float | None = None,
        norm: float = 2.0,
        donate: bool = False,
        dtype: torch.dtype | None = None,
        engine: str = "func",
        poison: bool = False,
    ) -> Step:
        """The training step of one rank: ``state = step.init(seed)``, then ``state, metrics = step(state, batch)``.

        Args:
            world: this rank's mesh and communication.
            optimizer: from ``fp.optim``.
            clip: largest global gradient norm; gradients are scaled down to it. None leaves them alone.
            norm: order of the global norm: 1, 2 or inf.
            donate: the step consumes the state it is given and reuses its memory; using that state again raises.
            dtype: of the parameters and activations; by default as ``fp.precision`` says, else float32. Without one it means
                ``fp.precision(compute=dtype)``: sums, and the optimizer's copy of the parameters, are float32 or better.
            engine: ``"func"`` differentiates with torch.func.vjp, ``"tape"`` with torch.autograd.grad; same numbers.
                ``"compile"`` compiles each layer function with torch.compile (``"compile:aot_eager"`` and so on for another
                backend than inductor): other rounding, and minutes at the first step.
            poison: for finding bugs: memory that is used again is filled with NaN in between, so that a value which is read
                before it is there spoils the loss. Right programs give the same bits with it.
        """
        from functional_par.step import Step

        return Step(
            self.plan(world.mesh),
            world,
            optimizer,
            clip=clip,
            norm=norm,
            donate=donate,
            dtype=dtype,
            engine=engine,
            poison=poison,
        )


def compose(*transforms: Transform) -> Callable[[Model], Program]:
    """Compose transforms, in any order, into a function from a model to a program.

    Applying it checks names, shapes and types on a mesh of ones, so a wrong composition is an error here.

    Raises:
        CompositionError: something that is not a transform, the same transform twice, or one that does not fit the model.
        TraceError: a layer with a missing or superfluous collective.
    """
    for transform in transforms:
        if not isinstance(transform, Transform):
            raise CompositionError(
                f"compose({transform!r}): not a transform. Call it first (fp.dp_reduce(), not fp.dp_reduce), and pass the "
                "model to the result: fp.compose(...)(model)."
            )
    kinds = [type(transform) for transform in transforms if not transform.repeatable]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise CompositionError(f"compose: {_name(kind)} is given {kinds.count(kind)} times; once is enough.")

    def apply(model: Model) -> Program:
        if not isinstance(model, Model):
            raise CompositionError(f"compose(...)({type(model).__name__}): expected an fp.Model.")
        for transform in transforms:
            model = transform.on_model(model)
        program = Program(model, transforms)
        program.plan(Mesh())
        return program

    return apply


def _name(kind: type) -> str:
    """What the user wrote to get one."""
    written = (("ShardTP", "shard_tp"), ("StagePP", "stage_pp"), ("DPReduce", "dp_reduce"))
    names = dict(written) | {kind: kind.lower() for kind in ("Remat", "Precision")}
    return names.get(kind.__name__, kind.__name__)
