"""Transforms of your own: frozen leaves, low-rank adapters (LoRA), a low-rank reduction and one in bfloat16. Each is a few
lines, works in every layout, and is held to what gradients owe when the program is composed.

Run it: ``python examples/own_transforms.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import functional_par as fp


def frozen(*patterns: str) -> fp.Transform:
    """Leaves that keep their values: no gradient, no optimizer state, nothing to reduce."""
    return fp.reparam(*patterns, leaves=lambda path, leaf: replace(leaf, trainable=False))


def lora(*patterns: str, rank: int, scale: float = 1.0) -> fp.Transform:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) on weights [out, in]: layers read ``w + scale * b @ a``, of which
    ``w`` is frozen. ``a`` [rank, in] and ``b`` [out, rank] are cut as ``w`` is, each in the dim that it shares with it."""

    def leaves(path: str, w: fp.Param) -> Mapping[str, fp.Param]:
        (n_out, n_in), (out, into) = w.shape, w.names
        return {
            "w": replace(w, trainable=False),
            "a": fp.Param((rank, n_in), f"rank {into}", fp.init.normal(n_in**-0.5)),
            "b": fp.Param((n_out, rank), f"{out} rank", fp.init.zeros()),
        }

    return fp.reparam(*patterns, leaves=leaves, value=lambda p, par: p["w"] + scale * p["b"] @ p["a"])


def low_rank(*patterns: str, rank: int) -> fp.Transform:
    """Gradients [m, n] are reduced as two factors, of rank * (m + n) numbers: the projection on a random subspace of the range
    (Halko, Martinsson, Tropp 2011, algorithm 4.1; one round of PowerSGD, Vogels et al. 2019, arXiv:1905.13727). Exact where
    the gradient has no higher rank."""

    def reduce(grad: Tensor, leaf: fp.Leaf) -> Tensor:
        flip = leaf.spec.names[1] in ("ffn", "heads", "vocab")  # a dim that tp may cut comes first
        g = grad.T if flip else grad
        p = leaf.psum(g @ leaf.normal(g.shape[1], rank), *leaf.owes)  # [m, rank], linear in g
        # Orthonormal columns by Cholesky, which sums over a dim that may be cut; a QR of the blocks would not do.
        gram = leaf.psum(p.T @ p, *leaf.spec.sharded)
        gram = gram + 1e-12 * gram.diagonal().sum() * torch.eye(rank, dtype=gram.dtype, device=gram.device)
        q = p @ torch.linalg.inv(torch.linalg.cholesky(gram)).T
        r = leaf.psum(q.T @ g, *leaf.owes, *leaf.spec.sharded)  # [rank, n]
        return (q @ r).T if flip else q @ r

    return fp.on_local_gradients(reduce, *patterns, name="low_rank")


def in_bfloat16(*patterns: str) -> fp.Transform:
    """Gradients travel in bfloat16: half the bytes, rounded once a rank."""

    def reduce(grad: Tensor, leaf: fp.Leaf) -> Tensor:
        return leaf.psum(grad.to(torch.bfloat16), *leaf.owes).to(grad.dtype)

    return fp.on_local_gradients(reduce, *patterns, name="in_bfloat16")


def clip_each_leaf(limit: float) -> fp.Transform:
    """Scale down each leaf's gradient to a norm of at most ``limit``."""

    def clip(grad: Tensor, leaf: fp.Leaf) -> Tensor:
        return grad * (limit / (leaf.norm(grad) + 1e-6)).clamp(max=1.0)

    return fp.on_reduced_gradients(clip)


def main() -> None:
    model = fp.models.llama(vocab=64, d_model=32, n_layers=2, n_heads=4, seq_len=16, d_ff=64)
    mesh = fp.Mesh(dp=2, tp=2)
    own: dict[str, list[Any]] = {
        "as it is": [],
        "adapters": [lora("blocks.*.mlp.*.weight", rank=4), frozen("embed.*", "blocks.*.attn.*")],
        "low-rank reduction": [low_rank("blocks.*.mlp.*.weight", rank=4)],
        "bfloat16 reduction": [in_bfloat16("blocks.*.attn.*")],
        "clipped by leaf": [clip_each_leaf(0.1)],
    }
    tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    for name, transforms in own.items():
        program = fp.compose(*transforms, fp.shard_tp("REDUCE_SCATTER"), fp.dp_reduce())(model)

        def train(world: fp.World, program: fp.Program = program) -> tuple[float, float, int]:
            step = program.step(world, fp.optim.adamw(lr=1e-2), donate=True)
            state = step.init(seed=0)
            losses = []
            for _ in range(20):
                state, metrics = step(state, batch)
                losses.append(metrics["loss"])
            sent = sum(n for (phase, _, _), n in world.record.nbytes.items() if phase == "gradients")
            return losses[0], losses[-1], sent // 20

        first, last, sent = fp.run(train, mesh)[0]
        print(f"{name:<20} loss {first:.3f} -> {last:.3f}, {sent:>7,} bytes of gradients a step")


if __name__ == "__main__":
    main()
