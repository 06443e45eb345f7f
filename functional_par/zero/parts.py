"""One rank's part of a bucket, as one flat tensor and as the slices of the leaves in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from functional_par.accumulate import pieces, shards
from functional_par.bucket import Bucket
from functional_par.buckets import buckets, frozen_buckets
from functional_par.plan import Plan


@dataclass(frozen=True)
class Part:
    """The part of a bucket with a given index: that of one rank of the bucket."""

    bucket: Bucket
    index: int

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The slices [elements] of a flat tensor [part]."""
        return pieces(self.bucket, self.index, flat)

    def shards(self, flat: Tensor) -> dict[str, Tensor]:
        """The leaves [*shard] of all parts together [elements]."""
        return shards(self.bucket, flat)

    def cut(self, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The slices of shards: views of those that are contiguous."""
        return {path: piece.of(leaves[path]) for path, piece, _ in self.bucket.slices(self.index)}

    def fresh(self, slices: Mapping[str, Tensor]) -> Tensor:
        """A flat tensor [part] with the values of these slices."""
        like = next(iter(slices.values()))
        flat = torch.zeros(self.bucket.part, dtype=like.dtype, device=like.device)
        for path, view in self.views(flat).items():
            view.copy_(slices[path])
        return flat

    def joined(self, slices: Mapping[str, Tensor]) -> Tensor:
        """The flat tensor that these slices are the views of; a copy, if they are not in one."""
        places = {path: at for path, _, at in self.bucket.slices(self.index)}
        held = [(slices[path], at) for path, at in places.items() if slices[path].numel()]
        if held:
            (first, at), storage = held[0], held[0][0].untyped_storage()
            base = int(first.storage_offset()) - at
            room = storage.nbytes() // first.element_size() - base
            if base >= 0 and room >= self.bucket.part and all(_lies(x, storage, base + at) for x, at in held):
                return first.as_strided((self.bucket.part,), (1,), base)
        return self.fresh(slices)


def parts(plan: Plan, rank: int) -> tuple[Part, ...]:
    """What a rank has of each bucket of parameters that is cut in slices, those of frozen leaves at the end."""
    both = (*buckets(plan, rank), *frozen_buckets(plan, rank))
    return tuple(Part(bucket, bucket.index(rank)) for bucket in both if bucket.sliced)


def together(plan: Plan, rank: int, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of a rank, their slices in one flat tensor a bucket, from which they are sent without a copy."""
    found = dict(params)
    for part in parts(plan, rank) if plan.zero == 3 else ():
        found |= part.views(part.fresh({path: params[path] for path in part.bucket.paths}))
    return found


def _lies(x: Tensor, storage: torch.UntypedStorage, offset: int) -> bool:
    return x.untyped_storage().data_ptr() == storage.data_ptr() and x.storage_offset() == offset and x.is_contiguous()
