"""The training step of one rank: count, run the schedule, pay the debts, norm, optimizer. In this order, see below."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from functional_par.accumulate import Memory
from functional_par.agreement import check_plan
from functional_par.batch import Share, share_of
from functional_par.bucket import Slice
from functional_par.buckets import groups, slices
from functional_par.checks import check_engine, check_options, check_state, check_threads
from functional_par.comm.base import AllReduce, World
from functional_par.errors import NonFiniteError
from functional_par.initial import initial
from functional_par.maps.apply import Moment
from functional_par.maps.apply import apply as apply_maps
from functional_par.metrics import Totals, clip_coefficient
from functional_par.optim import Optimizer
from functional_par.optim.base import Slots, slot_dtype
from functional_par.optim.master import MASTER, with_master
from functional_par.pipeline.part import lanes
from functional_par.pipeline.recording import Recording
from functional_par.pipeline.runner import Losses, Runner
from functional_par.pipeline.whole import check_whole
from functional_par.plan import Plan
from functional_par.random import Key
from functional_par.reduce import Gradients
from functional_par.restore import restore
from functional_par.run_par import RunPar, step_key
from functional_par.shards import gather_leaf, parameter_slices
from functional_par.state import State
from functional_par.tree import unflatten
from functional_par.zero.update import make_sliced

Metrics = dict[str, Any]


class Step:
    """``step(state, batch) -> (state, metrics)``. Made by ``program.step``; everything static is worked out here.

    1. The loss terms of the whole batch are counted; the loss is scaled by the count before backward, so gradients are
       plain sums however the batch is cut.
    2. The schedule runs; gradients accumulate in the order of the microbatches, in float32 or better unless ``precision``
       says otherwise.
    3. Debts are paid: one collective a bucket, which starts as soon as the last gradient has been added to it.
    4. One sum over the world gives loss and gradient norm, the same on every rank. It also orders this step's reads of
       shared buffers before the writes that follow.
    5. Gradients are clipped and the optimizer moves the parameters.
    """

    def __init__(
        self,
        plan: Plan,
        world: World,
        optimizer: Optimizer,
        *,
        clip: float | None = None,
        norm: float = 2.0,
        donate: bool = False,
        dtype: torch.dtype | None = None,
        engine: str = "func",
        poison: bool = False,
    ) -> None:
        check_options(optimizer, dtype, clip, norm)
        check_whole(plan)
        check_threads(plan, world)
        check_engine(plan, engine)
        self.precision = plan.precise(dtype, "step")
        check_plan(plan, world, self.precision)
        self.plan, self.world, self.optimizer = plan, world, with_master(optimizer, self.precision)
        self.clip, self.norm, self.donate, self.dtype = clip, norm, donate, self.precision.compute
        self.slices, self.parameter_slices = slices(plan, world.rank), parameter_slices(plan, world.rank)
        self.shapes = {path: self._shape(path) for path in plan.held(world.coords.pp)}
        self.sliced = make_sliced(plan, world, self.optimizer, inplace=donate)
        self.totals = Totals(plan, world.rank, norm)
        self.runner = Runner(plan, world, self.dtype, engine, poison)
        self._kept: Gradients | None = None
        self.par = self._prepare()

    def _prepare(self) -> RunPar:
        """Create every group that the step will use, in one order on all ranks."""
        plan, world = self.plan, self.world
        merged = plan.trace().merged
        world.prepare([*(group for axes in merged for group in world.mesh.groups(*axes)), *groups(plan)])
        world.connect((ring[a], ring[b]) for ring in world.mesh.groups("pp") for a, b in lanes(plan))
        axes = [(axis,) for axis, size in world.mesh.sizes.items() if size > 1 and axis != "pp"]
        return RunPar(
            groups={key: self.runner.lent(world.group(*key)) for key in [*axes, *merged]},
            mode=plan.mode,
            async_comm=plan.async_comm,
            device=world.device,
        )

    def init(self, seed: int = 0) -> State:
        """The initial state: this rank draws just its own shards, the same values in every layout."""
        return initial(self.plan, self.world, self.optimizer, seed, self.precision)

    def __call__(self, state: State, batch: Any, recording: Recording | None = None) -> tuple[State, Metrics]:
        """One step.

        Args:
            state: from ``init`` or the step before.
            batch: the global batch, the same on every rank: a dict of tensors with all rows in dim 0, or an object with
                ``size`` and ``rows(start, stop)``, of which each rank reads its own rows.
            recording: notes when each action ran, and how many activations were live.

        Returns:
            The new state, and ``loss`` (mean over the terms of the whole batch), ``grad_norm`` (before clipping),
            ``tokens`` (number of loss terms) and ``lr``, the same numbers on every rank.

        Raises:
            DataError: a batch that the model or the layout cannot take.
            NonFiniteError: loss or gradient norm is infinite or not a number; the state is left alone.
            StateError: a consumed state, or one of another program.
        """
        params = self._leaves_of(state)
        share = share_of(self.plan, self.world, batch, self.dtype)
        count = self._count(share)
        moment = Moment(params, state.step, step_key(state.seed, state.step))
        grads, losses = self._gradients(params, share, count, moment.key, recording)
        with self.world.record.during("gradients"):
            apply_maps(self.plan, "local", self.world, moment, grads.leaves)
            grads.pay(self.world)
            reduced = grads.views()
            apply_maps(self.plan, "reduced", self.world, moment, reduced)
        with self.world.record.during("metrics"):
            totals = self.totals.over_world(self.world, losses, reduced, self._fingerprint(state, share))
        totals.check_agreement()
        totals.check_count(count)
        metrics = {"loss": totals.loss / max(count, 1), "grad_norm": totals.norm, "tokens": count}
        metrics["lr"] = self.optimizer.lr(state.step)
        _check_finite(state.step, metrics)
        for flat in grads.flat if (factor := clip_coefficient(totals.norm, self.clip)) < 1.0 else ():
            flat.mul_(factor)
        return self._update(state, moment, reduced), metrics

    def evaluate(self, state: State, batch: Any, recording: Recording | None = None) -> Metrics:
        """Loss of a batch, forward only and through the same pipeline: ``loss`` and ``tokens``, the same on every rank. The
        state is left alone. Random numbers, such as those of dropout, are those of the step that the state would make.
        """
        params = self._leaves_of(state)
        share = share_of(self.plan, self.world, batch, self.dtype)
        count = self._count(share)
        par = replace(self.par, key=step_key(state.seed, state.step))
        losses = self.runner.evaluate(params, share, par, recording)
        with self.world.record.during("metrics"):
            totals = self.totals.of_losses(self.world, losses, self._fingerprint(state, share))
        totals.check_agreement()
        totals.check_count(count)
        return {"loss": totals.loss / max(count, 1), "tokens": count}

    def gather(self, state: State) -> dict[str, Any]:
        """All parameters whole, on every rank, as a nested dict; tied names included. Collective: every rank calls it."""
        return self._whole(self._leaves_of(state), self.dtype, tuple(self.plan.specs), self.parameter_slices)

    def gather_opt(self, state: State) -> dict[str, dict[str, Any]]:
        """The optimizer's state whole, on every rank: slot name, then a nested dict of the trainable leaves. Collective."""
        self._leaves_of(state)
        trained = tuple(path for path, spec in self.plan.specs.items() if spec.trainable)
        wide = slot_dtype(self.precision.master)
        return {slot: self._whole(flat, wide, trained, self.slices) for slot, flat in state.flat_opt.items()}

    def load(
        self,
        params: Mapping[str, Any],
        opt: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        step: int | None = None,
        seed: int = 0,
    ) -> State:
        """This rank's state out of whole trees, such as ``gather`` and ``gather_opt`` of a step in another layout return.

        Args:
            params: nested dict of whole leaves, in any dtype. A tied leaf may go by any of its names; all that are given
                hold the same values.
            opt: slot name, then a nested dict of whole leaves; None starts the optimizer afresh.
            step: number of steps done, by which the learning rate goes on; by default 0, but needed with ``opt``.
            seed: of the run, by which random numbers go on.

        Raises:
            StateError: a leaf that is missing, unknown or of another shape, tied names that differ, or slots of another
                optimizer.
        """
        return restore(
            self.plan,
            self.world.rank,
            self.optimizer,
            params,
            opt,
            step=step,
            seed=seed,
            precision=self.precision,
            device=self.world.device,
        )

    def _shape(self, path: str) -> tuple[int, ...]:
        """Of what this rank holds of a leaf."""
        own = self.parameter_slices.get(path)
        return self.plan.specs[path].local_shape(self.plan.mesh) if own is None else (own.elements,)

    def _leaves_of(self, state: State) -> dict[str, Tensor]:
        """Parameters by path of a state that belongs here."""
        return check_state(state, self.shapes, self.optimizer, self.dtype)

    def _whole(
        self, flat: Mapping[str, Tensor], dtype: torch.dtype, paths: tuple[str, ...], own: Mapping[str, Slice]
    ) -> dict[str, Any]:
        """These leaves whole, under all their names, of shards or of this rank's ``own`` slices of them."""
        plan, world = self.plan, self.world
        whole = {path: gather_leaf(plan, world, path, flat.get(path), dtype, own.get(path)) for path in paths}
        return unflatten(self.plan.named(whole))

    def _fingerprint(self, state: State, share: Share) -> int:
        """16 bits of what must be the same on every rank for the ranks to take one step together."""
        options = (
            state.step,
            state.seed,
            self.optimizer.lr(state.step),
            self.clip,
            self.norm,
            sorted(share.shapes().items()),
        )
        return zlib.crc32(repr(options).encode()) & 0xFFFF

    def _count(self, share: Share) -> int:
        count = sum(self.plan.model.count_terms(share.microbatch(i)) for i in range(self.plan.microbatches))
        total = torch.as_tensor(count, dtype=torch.int64, device=self.world.device).reshape(1)
        with self.world.record.during("count"):
            group = self.world.group(*self.plan.data_axes)
            return int(group.start(AllReduce(), total, donate=True).wait())

    def _gradients(
        self,
        params: Mapping[str, Tensor],
        share: Share,
        count: int,
        key: Key,
        recording: Recording | None,
    ) -> tuple[Gradients, Losses]:
        grads = self._buffers()
        losses = self.runner.train(params, share, replace(self.par, key=key), grads, 1.0 / max(count, 1), recording)
        grads.complete()
        return grads, losses

    def _buffers(self) -> Gradients:
        """Where gradients accumulate: always the same memory with ``donate``, else fresh."""
        grads = self._kept
        if grads is None:
            early = not any(each.phase == "local" for each in self.plan.maps)  # such maps need all gradients, unsummed
            world, kinds = self.world, self.precision
            memory = Memory(kinds.accumulate, world.device, self.runner.buffers.poison, kinds.wire)
            grads = Gradients(self.plan, world.rank, memory, world if early else None)
            self._kept = grads if self.donate else None
        grads.begin()
        return grads

    def _update(self, state: State, moment: Moment, grads: Mapping[str, Tensor]) -> State:
        slots = state.flat_opt
        if self.donate:
            state.consume()
        mapped = any(each.phase == "update" for each in self.plan.maps)
        trainable = {path: moment.params[path] for path in grads}
        mastered = self.precision.mastered
        old = {path: x.clone() for path, x in (slots[MASTER] if mastered else trainable).items()} if mapped else {}
        moved, slots = self._moved(grads, slots, trainable, state.step)
        if mapped:
            masters = self._mapped(slots[MASTER] if mastered else moved, replace(moment, params=old))
            moved = {path: leaf.copy_(masters[path]) for path, leaf in moved.items()}
        return State(state.step + 1, state.seed, {**moment.params, **moved}, slots)

    def _moved(
        self, grads: Mapping[str, Tensor], slots: Slots, params: Mapping[str, Tensor], step: int
    ) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        if self.sliced is None:
            return self.optimizer.update(grads, slots, params, step, inplace=self.donate)
        with self.world.record.during("parameters"):
            return self.sliced(grads, slots, params, step)

    def _mapped(self, moved: Mapping[str, Tensor], before: Moment) -> dict[str, Tensor]:
        """The parameters after the user's maps on updates."""
        updates = {path: leaf - before.params[path] for path, leaf in moved.items()}
        apply_maps(self.plan, "update", self.world, before, updates)
        return {path: leaf.copy_(before.params[path] + updates[path]) for path, leaf in moved.items()}


def _check_finite(step: int, metrics: Metrics) -> None:
    for name in ("loss", "grad_norm"):
        if not math.isfinite(metrics[name]):
            raise NonFiniteError(
                f"step {step + 1}: {name} is {metrics[name]}. The state is unchanged. Lower the learning rate, clip gradients, "
                "or look at the data of this step."
            )
