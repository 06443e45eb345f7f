"""Paying the debts: every leaf's gradient is summed once over exactly the ranks that hold a part of it.

Leaves that owe the same set of ranks share flat buffers, the *buckets*, each of which is one collective a step on the merged
group, so every copy of a leaf gets the same bits. Nothing else in the library reduces a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from functional_par.accumulate import Memory, Passing, Whole, pieces, shards
from functional_par.bucket import Bucket
from functional_par.buckets import buckets, contributions, rest_sums
from functional_par.comm.base import AllReduce, World
from functional_par.plan import Plan
from functional_par.shards import has_padding, zero_padding


class Gradients:
    """The gradients of one rank, for one step at a time. The first gradient of a leaf is written, later ones are added, in the
    order of the calls.

    With ``plan.zero`` each rank ends with the sum of its own slice of a leaf: a reduce-scatter over the data axes, and then an
    all-reduce of the slices over the ranks that the leaf owes besides. With 2 and 3 that is done with what each layer adds for
    each microbatch, so whole gradients are there for one layer at a time; it is waited for when the next layer comes.

    Given a ``world``, a bucket's sum starts as soon as the last gradient has been added to it, while others are still
    computed. All ranks of a group start the same sums in the same order:

    - A set of ranks that spans stages, of leaves that are tied over them, starts nothing before ``pay``: its ranks end their
      backwards at different times, and one that still waits for a message must not wait for a sum of the others. Layers have
      no collective over pp, so nothing else is started on such a set; and in ``pay`` the order is that of the list, which is
      the same on all of them.
    - The ranks of a set within one stage run the same tasks of the same layers in the same order, so they add the last
      gradient to each bucket at the same place of their programs, also between the collectives that layers have on the same
      set. Of several buckets that are ready there the order is again that of the list.
    - Starting waits for nobody, and nobody waits before ``pay`` for a sum but ranks of one stage, at one place.

    Attributes:
        flat: after ``pay`` the sum of each bucket, or this rank's part of it.
    """

    def __init__(self, plan: Plan, rank: int, memory: Memory, world: World | None = None) -> None:
        self.plan, self.rank, self.memory, self.world = plan, rank, memory, world
        self.buckets = buckets(plan, rank)
        self._of = {path: i for i, bucket in enumerate(self.buckets) for path in bucket.paths}
        self._expected = [0] * len(self.buckets)
        if world is not None:
            for path, n in contributions(plan, world.coords.pp).items():
                self._expected[self._of[path]] += n
        coords = plan.mesh.coords(rank)
        self._padded = {path for path in self._of if has_padding(plan.specs[path], plan.mesh, coords)}
        self._accounts = [self._account(bucket) for bucket in self.buckets]
        self.begin()

    def _account(self, bucket: Bucket) -> Whole | Passing:
        passing = bucket.sliced and self.plan.zero > 1
        return (Passing if passing else Whole)(bucket, self.memory, self._finish)

    def _finish(self, path: str, leaf: Tensor) -> None:
        if path in self._padded:
            zero_padding(self.plan.specs[path], self.plan.mesh, self.plan.mesh.coords(self.rank), leaf)

    def begin(self) -> None:
        """Forget the step before: the next gradient of each leaf is the first."""
        self.flat: list[Tensor] = []
        self._under_way: Passing | None = None
        for account, bucket, expected in zip(self._accounts, self.buckets, self._expected, strict=True):
            account.begin(0 if "pp" in bucket.axes else expected)

    @property
    def leaves(self) -> dict[str, Tensor]:
        """What adds up for each leaf whose whole shard is here."""
        whole = (account.leaves for account in self._accounts if isinstance(account, Whole))
        return {path: leaf for leaves in whole for path, leaf in leaves.items()}

    def add(self, grads: Mapping[str, Tensor]) -> None:
        """Accumulate one layer's gradients of one microbatch."""
        for path, grad in grads.items():
            self._accounts[self._of[path]].add(path, grad)

    def buffer(self, path: str) -> tuple[Tensor, bool]:
        """The memory of a leaf's gradient, to which the caller adds now; True if it is the first, which overwrites."""
        return self._accounts[self._of[path]].buffer(path)

    def done(self, paths: Sequence[str]) -> None:
        """One layer has added all that one microbatch gives to these leaves."""
        if self.world is None:
            return
        touched = [self._of[path] for path in paths]
        with self.world.record.during("gradients"):
            for i in sorted(set(touched)):
                account = self._accounts[i]
                if isinstance(account, Whole):
                    account.done(self.world, touched.count(i))
                else:
                    self._settle()
                    account.done(self.world)
                    self._under_way = account

    def _settle(self) -> None:
        if self._under_way is not None:
            self._under_way.settle()
        self._under_way = None

    def complete(self) -> None:
        """After the last microbatch: finish what has not started."""
        for account in self._accounts:
            if isinstance(account, Whole):
                account.close()

    def pay(self, world: World) -> None:
        """Sum every bucket over its ranks, and wait for all that is under way."""
        for account in self._accounts:
            if isinstance(account, Whole):
                account.start(world)
        self.flat = [account.total(world) for account in self._accounts]
        self._pay_rest(world)

    def _pay_rest(self, world: World) -> None:
        """Sum slices over the ranks that their leaves owe besides."""
        wire = self.memory.reduce or self.memory.dtype
        started = []
        for rest in rest_sums(self.plan, self.rank, self.buckets):
            parts = [self.flat[i][start:stop] for i, start, stop in rest.stretches]
            group = world.subgroup(rest.ranks, rest.label)
            started.append((parts, group.start(AllReduce(), torch.cat(parts).to(wire), donate=True)))
        for parts, handle in started:
            for part, total in zip(parts, handle.wait().split([len(part) for part in parts]), strict=True):
                part.copy_(total)

    def views(self) -> dict[str, Tensor]:
        """After ``pay`` the gradient of each leaf, [*shard] or this rank's slice of it [elements], as views of ``flat``."""
        found: dict[str, Tensor] = {}
        for bucket, part in zip(self.buckets, self.flat, strict=True):
            found |= pieces(bucket, bucket.index(self.rank), part) if bucket.sliced else shards(bucket, part)
        return found
