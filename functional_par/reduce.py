"""Paying the debts: every leaf's gradient is summed once over exactly the ranks that hold a part of it.

Leaves that owe the same set of ranks share flat buffers, the *buckets*, each of which is one collective a step on the merged
group, so every copy of a leaf gets the same bits. Nothing else in the library reduces a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from functional_par.buckets import Bucket, contributions
from functional_par.comm.base import AllReduce, Handle, World
from functional_par.comm.solo import Done
from functional_par.mesh import Coords
from functional_par.plan import Plan
from functional_par.shards import zero_padding


class Gradients:
    """Accumulation buffers of one rank: a flat tensor a bucket, a view a leaf. Used for one step at a time.

    The first gradient of a leaf is written, later ones are added, in the order of the calls. With ``poison`` the memory is
    filled with NaN before.

    Given a ``world``, a bucket's sum starts as soon as the last gradient has been added to it, while others are still
    computed. All ranks of a group start the same sums in the same order:

    - A set of ranks that spans stages, of leaves that are tied over them, starts nothing before ``pay``: its ranks end their
      backwards at different times, and one that still waits for a message must not wait for a sum of the others. Layers have
      no collective over pp, so nothing else is started on such a set; and in ``pay`` the order is that of the list, which is
      the same on all of them.
    - The ranks of a set within one stage run the same tasks of the same layers in the same order, so they add the last
      gradient to each bucket at the same place of their programs, also between the collectives that layers have on the same
      set. Of several buckets that are ready there the order is again that of the list.
    - Starting waits for nobody, and nobody waits for a sum before ``pay``.
    """

    def __init__(
        self,
        plan: Plan,
        owed: Sequence[Bucket],
        dtype: torch.dtype,
        device: torch.device,
        poison: bool = False,
        world: World | None = None,
    ) -> None:
        self.plan, self.buckets, self.poison, self.world = plan, tuple(owed), poison, world
        self.flat = [torch.zeros(bucket.elements, dtype=dtype, device=device) for bucket in owed]
        self.bucket_of = {path: i for i, bucket in enumerate(owed) for path in bucket.paths}
        self._expected = {} if world is None else contributions(plan, world.coords.pp)
        self.leaves = self.views()
        self.begin()

    def begin(self) -> None:
        """Forget the step before: the next gradient of each leaf is the first."""
        self._unwritten = set(self.leaves)
        self._started: dict[int, Handle] = {}
        self._left = [0] * len(self.buckets)
        for path, n in self._expected.items():
            self._left[self.bucket_of[path]] += n
        for flat in self.flat if self.poison else ():
            flat.fill_(torch.nan)

    def add(self, grads: Mapping[str, Tensor]) -> None:
        """Accumulate one layer's gradients of one microbatch."""
        for path, grad in grads.items():
            buffer, first = self.buffer(path)
            if first:
                buffer.copy_(grad)
            else:
                buffer.add_(grad)

    def buffer(self, path: str) -> tuple[Tensor, bool]:
        """The memory of a leaf's gradient, to which the caller adds now; True if it is the first, which overwrites."""
        first = path in self._unwritten
        self._unwritten.discard(path)
        return self.leaves[path], first

    def done(self, paths: Sequence[str]) -> None:
        """One layer has added all that one microbatch gives to these leaves."""
        if self.world is None:
            return
        for path in paths:
            self._left[self.bucket_of[path]] -= 1
        with self.world.record.during("gradients"):
            for i in sorted({self.bucket_of[path] for path in paths}):
                if not self._left[i] and "pp" not in self.buckets[i].axes:
                    self._close(i, self.world.coords)
                    self._start(i, self.world)

    def _start(self, i: int, world: World) -> None:
        """Send the sum of a bucket on its way."""
        bucket, flat = self.buckets[i], self.flat[i]
        if len(bucket.ranks) > 1:
            self._started[i] = world.subgroup(bucket.ranks, bucket.label).start(AllReduce(), flat, donate=True)
        else:
            self._started[i] = Done(flat)

    def _close(self, i: int, coords: Coords) -> None:
        """Zero where no gradient came, and where it flowed into the padding of an uneven shard (the transpose of padding with
        zeros forgets it)."""
        for path in self.buckets[i].paths:
            if path in self._unwritten:
                self.leaves[path].zero_()
            zero_padding(self.plan.specs[path], self.plan.mesh, coords, self.leaves[path])

    def complete(self, coords: Coords) -> None:
        """After the last microbatch: finish the buckets whose sums have not started."""
        for i in range(len(self.buckets)):
            if i not in self._started:
                self._close(i, coords)

    def pay(self, world: World) -> None:
        """Sum every bucket over its ranks: one collective a bucket, all in flight together."""
        for i in range(len(self.buckets)):
            if i not in self._started:
                self._start(i, world)
        self.flat = [self._started[i].wait() for i in range(len(self.buckets))]

    def views(self) -> dict[str, Tensor]:
        """Gradient of each leaf, as views of the buckets."""
        self.leaves = {}
        for bucket, flat in zip(self.buckets, self.flat, strict=True):
            self.leaves |= {path: flat[at : at + s.numel()].view(s) for path, s, at in _sized(bucket)}
        return self.leaves


def _sized(bucket: Bucket) -> list[tuple[str, torch.Size, int]]:
    return [(path, torch.Size(shape), start) for path, shape, start in bucket.places()]
