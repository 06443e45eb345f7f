"""The plan: everything that follows from a model, the transforms and a mesh, before any process exists. Pure data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from functional_par.errors import MeshError
from functional_par.maps.gradient_map import GradientMap
from functional_par.maps.infer import infer
from functional_par.mesh import AXES, Mesh
from functional_par.model import LOSS, Layer, Model
from functional_par.par import TensorParallelMode
from functional_par.pipeline.costs import Costs
from functional_par.pipeline.products import FULL
from functional_par.pipeline.schedule import Schedule
from functional_par.pipeline.schedules import make_schedule
from functional_par.precision import Precision, chosen
from functional_par.spec import Debt, Spec
from functional_par.trace import Setting, Trace, trace

if TYPE_CHECKING:
    from functional_par.pipeline.told import Told

T = TypeVar("T")

Fields = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each field of a microbatch."""


@dataclass(frozen=True)
class Plan:
    """Where everything lies and what every gradient owes. Transforms are commuting maps from plan to plan.

    Attributes:
        mesh: axis sizes.
        source: the model as the user wrote it.
        model: the model with ties applied: one leaf a tied set.
        specs: leaf path to sharding annotation, for the leaves of ``model``.
        aliases: tied path to the path that stands for it.
        costs: work of each layer's forward on one row, in floating-point operations, a third more where it runs again, or as
            ``stage_pp`` was told; the loss is one of them.
        parts: times of forward, input backward and weight backward of each layer, where ``stage_pp`` was told measured ones.
        stages: names of the layers of each pipeline stage; the loss belongs to the last.
        placement: the pp coordinate of the ranks that run each stage; several stages may be on one.
        schedule, microbatches: how the pipeline runs: the schedule's name, and pieces of each replica's share of the batch.
        given: the user's own schedule, else None.
        told: the shapes of a microbatch, where ``stage_pp`` was told them: by a bound of memory, or by measured costs.
        cut: makes the stages when everything else is known, if they depend on it; None once they are there.
        mode, async_comm: how tensor-parallel layers communicate.
        active: the axes that some transform uses.
        data_axes: the axes along which the batch is split, in mesh order.
        zero: what ranks along the data axes share out: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too.
        bucket_mb: MiB of gradients that are summed in one collective.
        remat: layer name to what is kept of its forward, "full" or "selective" as ``remat`` defines them; of all others
            everything is kept.
        precision: the dtypes of a step, where ``precision`` says them; None leaves them to the step.
        maps: the user's own maps on gradients and updates, in the order of the transforms.
        map_groups: (axes, stages) of the collectives of these maps.
    """

    mesh: Mesh
    source: Model
    model: Model
    specs: Mapping[str, Spec]
    aliases: Mapping[str, str] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    stages: tuple[tuple[str, ...], ...] = ()
    placement: tuple[int, ...] = (0,)
    schedule: str = "1f1b"
    microbatches: int = 1
    given: Schedule | None = None
    told: Told | None = None
    cut: Callable[[Plan], tuple[tuple[str, ...], ...]] | None = field(default=None, compare=False)
    mode: TensorParallelMode = TensorParallelMode.ALL_REDUCE
    async_comm: bool = False
    active: frozenset[str] = frozenset()
    data_axes: tuple[str, ...] = ()
    zero: int = 0
    bucket_mb: float = 48.0
    remat: Mapping[str, str] = field(default_factory=dict)
    precision: Precision | None = None
    maps: tuple[GradientMap, ...] = ()
    map_groups: frozenset[tuple[tuple[str, ...], tuple[int, ...]]] = frozenset()
    _traced: dict[Any, tuple[Model, Trace]] = field(default_factory=dict, compare=False, repr=False)
    _lock: Any = field(default_factory=RLock, compare=False, repr=False)
    _traces: dict[Any, Trace] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Of this plan by shapes alone; `_traced` is shared with the plans that are made from it by `replace`.
        object.__setattr__(self, "_traces", {})

    @classmethod
    def start(cls, model: Model, mesh: Mesh, costs: Mapping[str, float]) -> Plan:
        """The plan of the plain function: every leaf whole, one stage, nothing owed."""
        specs = {
            path: Spec(path, leaf.shape, leaf.names, (None,) * len(leaf.shape), trainable=leaf.trainable)
            for path, leaf in model.leaves.items()
        }
        return cls(mesh, model, model, specs, costs=costs, stages=(tuple(layer.name for layer in model.layers),))

    def use(self, *axes: str) -> Plan:
        """The same plan, in which a transform takes charge of these axes."""
        return replace(self, active=self.active | frozenset(axes))

    @cached_property
    def replicas(self) -> int:
        """Number of different shares of the batch."""
        size = 1
        for axis in self.data_axes:
            size *= getattr(self.mesh, axis)
        return size

    @property
    def pieces(self) -> int:
        """Into how many pieces of equal rows a global batch is cut: replicas times microbatches."""
        return self.replicas * self.microbatches

    def named(self, flat: Mapping[str, T]) -> dict[str, T]:
        """What is known by the paths of ``model``, under all names of the model as written; paths left out stay out."""
        names = ((name, self.aliases.get(name, name)) for name in self.source.leaves)
        return {name: flat[path] for name, path in names if path in flat}

    def precise(self, dtype: torch.dtype | None = None, asked: str = "memory") -> Precision:
        """The dtypes of a step, for a caller who asks for a dtype or leaves it to the plan; raises as ``chosen`` does."""
        return chosen(self.precision, dtype, asked)

    def replica(self, rank: int) -> int:
        """Which share of the batch a rank works on."""
        coords, index = self.mesh.coords(rank), 0
        for axis in self.data_axes:
            index = index * getattr(self.mesh, axis) + getattr(coords, axis)
        return index

    @cached_property
    def stage_of(self) -> dict[str, int]:
        """Layer name to pipeline stage, the loss included."""
        return {name: i for i, names in enumerate(self.stages) for name in names} | {LOSS: len(self.stages) - 1}

    def stage_layers(self, stage: int) -> tuple[Layer, ...]:
        """The layers of a stage in order, with the loss on the last."""
        return tuple(layer for layer in self.model.all_layers if self.stage_of[layer.name] == stage)

    def stage_leaves(self, stage: int) -> tuple[str, ...]:
        """Paths of the leaves that a stage reads, in the order of the tree."""
        read = {path for layer in self.stage_layers(stage) for path in layer.paths}
        return tuple(path for path in self.specs if path in read)

    def stages_on(self, pp: int) -> tuple[int, ...]:
        """The stages that the ranks at a pp coordinate run."""
        return tuple(stage for stage, at in enumerate(self.placement) if at == pp)

    def layers_on(self, pp: int) -> tuple[Layer, ...]:
        """The layers that the ranks at a pp coordinate run, with the loss where the last stage is."""
        return tuple(layer for layer in self.model.all_layers if self.placement[self.stage_of[layer.name]] == pp)

    def held(self, pp: int) -> tuple[str, ...]:
        """Paths of the leaves that the ranks at a pp coordinate hold, in the order of the tree. Each is there once, also if
        several of their stages read it."""
        return tuple(path for path, spec in self.specs.items() if pp in spec.owners)

    @cached_property
    def timetable(self) -> Schedule:
        """The actions of every pipeline rank, in order: made when they are first asked for.

        Raises:
            ScheduleError: a schedule of the user's own that is incomplete, out of order, or cannot finish.
        """
        if self.given is not None:
            return self.given
        chunks = len(self.stages) // self.mesh.pp
        return make_schedule(self.schedule, self.mesh.pp, self.microbatches, chunks, self.stage_costs)

    @property
    def stage_costs(self) -> Costs:
        """What the actions of each stage take: as measured, or the work of its forward three times."""
        parts = self.parts or {name: (work, work, work) for name, work in self.costs.items()}
        mine = [[parts.get(layer.name, (0.0,) * 3) for layer in self.stage_layers(s)] for s in range(len(self.stages))]
        forward, first, second = ([sum(part[i] for part in each) for each in mine] for i in range(3))
        return Costs(forward, first, second)

    def trace(self, batch: Fields | None = None, dtype: torch.dtype = torch.float32) -> Trace:
        """Infer types, shapes and debts for microbatches of the given shapes (by default small ones). Done once a shape,
        also when the ranks are threads that share the plan."""
        batch = batch or self.example()
        asked = tuple(sorted(batch.items())), dtype
        with self._lock:
            if asked not in self._traces:
                setting = self._setting(batch, dtype)
                key = id(self.model), setting.key
                if key not in self._traced:
                    self._traced[key] = self.model, trace(self.model, setting)
                self._traces[asked] = self._traced[key][1]
            return self._traces[asked]

    def with_model(self, model: Model) -> Plan:
        """The same plan of a model that computes the same: what has been traced stays known."""
        known = {(id(model), at[1]): (model, found) for at, (its, found) in self._traced.items() if its is self.model}
        return replace(self, model=model, _traced=known)

    def _setting(self, batch: Fields, dtype: torch.dtype) -> Setting:
        return Setting(
            sizes=self.mesh.sizes,
            active=self.active - {"pp"},
            data=frozenset(self.data_axes),
            leaves={p: (s.local_shape(self.mesh), frozenset(s.sharded)) for p, s in self.specs.items()},
            batch=batch,
            mode=self.mode,
            async_comm=self.async_comm,
            dtype=dtype,
        )

    def example(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Fields of a small microbatch that every axis divides."""
        free = 2 * self.mesh.tp * self.mesh.cp
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, given in (self.model.batch or {}).items():
            sizes = [
                1 if size is None and i == 0 else free if size is None else size for i, size in enumerate(given.shape)
            ]
            shapes[name] = (tuple(sizes), given.dtype)
        return shapes

    def finish(self) -> Plan:
        """Give every leaf its stages and its debts; raises what only the whole plan reveals."""
        self._check_axes()
        if self.cut is not None:
            self = replace(self, stages=self.cut(self), cut=None)
        owners = self._owners()
        staged = replace(self, specs={p: replace(spec, owners=owners[p]) for p, spec in self.specs.items()})
        debts = staged.trace().debts
        specs = {}
        for path, spec in staged.specs.items():
            owed = {debt.axis: debt for debt in debts[path]}
            if len(spec.owners) > 1:
                owed["pp"] = _tie_debt(self.readers[path])
            specs[path] = replace(
                spec, owes=tuple(owed[axis] for axis in AXES if axis in owed) if spec.trainable else ()
            )
        mapped = infer(self.maps, specs, self.mesh)
        # The mesh of ones, whose one stage needs no costs, tells them to all others.
        works = {name: layer.work for name, layer in staged.trace().layers.items()}
        # A third more where all of a forward runs again: four times its work in place of three.
        costs = self.costs or {n: w * 4 // 3 if self.remat.get(n) == FULL else w for n, w in works.items()}
        return replace(self, specs=mapped.specs, map_groups=mapped.groups, costs=costs)

    def _owners(self) -> dict[str, tuple[int, ...]]:
        """The pp coordinates of the stages that read each leaf."""
        return {path: tuple(sorted({self.placement[s] for s in self.readers[path]})) for path in self.specs}

    @cached_property
    def readers(self) -> dict[str, tuple[int, ...]]:
        """Leaf path to the stages that read it, in order."""
        stages: dict[str, set[int]] = {path: set() for path in self.specs}
        for layer in self.model.all_layers:
            for path in layer.paths:
                stages[path].add(self.stage_of[layer.name])
        return {path: tuple(sorted(found)) for path, found in stages.items()}

    def _check_axes(self) -> None:
        for axis, size in self.mesh.sizes.items():
            if size > 1 and axis not in self.active:
                fix = _FIX[axis]
                raise MeshError(
                    f"{self.mesh}: axis {axis} has size {size}, but no transform of this program uses it; its ranks would "
                    f"all compute the same. {fix}"
                )

    def summary(self) -> dict[str, Any]:
        """The choices of the transforms, for headers."""
        return {
            "stages": len(self.stages),
            "schedule": self.schedule,
            "microbatches": self.microbatches,
            "tp mode": self.mode.value if "tp" in self.active else "none",
            "async": self.async_comm,
            "data axes": "+".join(self.data_axes) or "none",
        }


def _tie_debt(stages: tuple[int, ...]) -> Debt:
    """What a leaf owes whose copies lie on several stages."""
    return Debt("pp", f"tied: read on stages {', '.join(map(str, stages))}")


_FIX = {
    "dp": "Add fp.dp_reduce(), or set dp=1.",
    "ep": "Add fp.dp_reduce(), or set ep=1.",
    "tp": "Add fp.shard_tp(), or set tp=1.",
    "pp": "Add fp.stage_pp(), or set pp=1.",
    "cp": "Splitting the sequence of attention over cp needs a transform that this version does not have; set cp=1.",
}
