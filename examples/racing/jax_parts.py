"""The same step in jax: one jitted program under ``jax.shard_map``, over devices that are threads of this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from .models import NORM_EPS, angles_of, batch_of, weights_of
from .setting import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, Job
from .worker import Serve

AXES = ("dp", "pp", "tp")
Tree = dict[str, Any]


def main(job: Job, serve: Serve) -> None:
    """No options."""
    devices = job.contender.inside
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false"  # a thread a device
    )
    import jax
    import jax.numpy as jnp

    mesh = jax.make_mesh(tuple(map(job.axis, AXES)), AXES)
    specs = layout_of(jax.sharding.PartitionSpec)

    def placed(x: Any, spec: Any) -> Any:
        return jax.device_put(jnp.asarray(x.numpy()), jax.sharding.NamedSharding(mesh, spec))

    params = {name: placed(x, specs[name]) for name, x in stacked(weights_of(job.sizes)).items()}
    rows = jax.sharding.PartitionSpec("dp")
    batch = {name: placed(x, rows) for name, x in batch_of(job.sizes).items()}
    cos, sin = (jnp.asarray(x.numpy()) for x in angles_of(job.sizes))
    local = partial(local_loss, cos=cos, sin=sin, pp=job.axis("pp"), microbatches=job.microbatches)
    whole = jax.sharding.PartitionSpec()
    loss = jax.shard_map(local, mesh=mesh, in_specs=(specs, dict.fromkeys(batch, rows)), out_specs=whole)
    step = jax.jit(partial(adamw, loss), donate_argnums=(0, 1, 2))
    first, second = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    count = 0

    def once() -> float:
        nonlocal params, first, second, count
        count += 1
        value, params, first, second = step(params, first, second, float(count), batch)
        return float(value)

    serve(once)


def stacked(weights: Mapping[str, Any]) -> Tree:
    """The weights, those of all blocks stacked: name to [blocks, ...]."""
    import torch

    names = [path.removeprefix("blocks.0.") for path in weights if path.startswith("blocks.0.")]
    blocks = 1 + max(int(path.split(".")[1]) for path in weights if path.startswith("blocks."))
    rest = {path: x for path, x in weights.items() if not path.startswith("blocks.")}
    return {n: torch.stack([weights[f"blocks.{i}.{n}"] for i in range(blocks)]) for n in names} | rest


def layout_of(spec: Any) -> Tree:
    """How each leaf lies: blocks over pp, heads, ffn and vocabulary over tp."""
    column, row, norm = spec("pp", "tp"), spec("pp", None, "tp"), spec("pp")
    blocks = {f"attn.{name}.weight": column for name in "qkv"} | {"attn.out.weight": row}
    blocks |= {"mlp.gate.weight": column, "mlp.up.weight": column, "mlp.down.weight": row}
    return blocks | {
        "norm1.weight": norm,
        "norm2.weight": norm,
        "embed.weight": spec(),
        "norm.weight": spec(),
        "head.weight": spec("tp"),
    }


def local_loss(p: Tree, batch: Tree, *, cos: Any, sin: Any, pp: int, microbatches: int) -> Any:
    """The mean loss, from this device's shards and rows."""
    import jax.numpy as jnp
    from jax import lax

    rest = ("embed.weight", "norm.weight", "head.weight")
    blocks = {name: x for name, x in p.items() if name not in rest}

    def stage(x: Any) -> Any:
        return lax.scan(lambda x, w: (block(w, x, cos, sin), None), x, blocks)[0]

    x = lax.pcast(p["embed.weight"][batch["tokens"]], "pp", to="varying")
    x = stage(x) if pp == 1 else pipelined(stage, x, pp, microbatches)
    # Every stage runs the head, and the last alone has the right value: a branch with a collective in it ends XLA's CPU client.
    last = lax.axis_index("pp") == pp - 1
    summed = jnp.where(last, vocab_loss(p, x, batch["labels"]), 0.0)
    return lax.psum(summed, ("dp", "pp")) / (batch["labels"].size * lax.axis_size("dp"))


def pipelined(stage: Callable[[Any], Any], x: Any, pp: int, microbatches: int) -> Any:
    """GPipe: in each tick every stage runs on what the one before has sent in the last."""
    import jax.numpy as jnp
    from jax import lax

    first = lax.axis_index("pp") == 0
    pieces = x.reshape(microbatches, -1, *x.shape[1:])
    state, done = 0 * pieces[0], []
    for tick in range(microbatches + pp - 1):
        state = stage(jnp.where(first, pieces[min(tick, microbatches - 1)], state))
        done.append(state)
        state = lax.ppermute(state, "pp", [(i, (i + 1) % pp) for i in range(pp)])
    return jnp.concatenate(done[pp - 1 :])


def rms_norm(x: Any, weight: Any) -> Any:
    import jax.numpy as jnp
    from jax import lax

    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + NORM_EPS) * weight


def block(w: Tree, x: Any, cos: Any, sin: Any) -> Any:
    """One block, its heads and ffn cut over tp."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    head = cos.shape[-1]

    def heads(y: Any) -> Any:
        return y.reshape(*y.shape[:2], -1, head)

    def turn(y: Any) -> Any:
        a, b = jnp.split(y, 2, -1)
        return y * cos[:, None] + jnp.concatenate([-b, a], -1) * sin[:, None]

    y = rms_norm(x, w["norm1.weight"])
    q, k, v = (heads(y @ w[f"attn.{name}.weight"].T) for name in "qkv")
    y = jax.nn.dot_product_attention(turn(q), turn(k), v, is_causal=True)
    x = x + lax.psum(y.reshape(*y.shape[:2], -1) @ w["attn.out.weight"].T, "tp")
    y = rms_norm(x, w["norm2.weight"])
    hidden = jax.nn.silu(y @ w["mlp.gate.weight"].T) * (y @ w["mlp.up.weight"].T)
    return x + lax.psum(hidden @ w["mlp.down.weight"].T, "tp")


def vocab_loss(p: Tree, x: Any, labels: Any) -> Any:
    """The sum of the cross-entropy, the vocabulary cut over tp."""
    import jax.numpy as jnp
    from jax import lax

    weight = p["head.weight"]
    logits = rms_norm(x, p["norm.weight"]) @ weight.T
    top = lax.pmax(lax.stop_gradient(logits.max(-1)), "tp")
    local = labels - lax.axis_index("tp") * weight.shape[0]
    mine = (local >= 0) & (local < weight.shape[0])
    target = jnp.take_along_axis(logits, jnp.where(mine, local, 0)[..., None], -1)[..., 0]
    parts = lax.psum(jnp.stack([jnp.exp(logits - top[..., None]).sum(-1), jnp.where(mine, target, 0)]), "tp")
    return (jnp.log(parts[0]) + top - parts[1]).sum()


def adamw(loss: Callable[..., Any], p: Tree, first: Tree, second: Tree, count: Any, batch: Tree) -> Any:
    """One step: gradients clipped by their global norm, AdamW with decoupled decay."""
    import jax
    import jax.numpy as jnp

    value, grads = jax.value_and_grad(loss)(p, batch)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / (norm + 1e-6)), grads)
    a, b = BETAS
    first = jax.tree.map(lambda m, g: a * m + (1 - a) * g, first, grads)
    second = jax.tree.map(lambda v, g: b * v + (1 - b) * g * g, second, grads)

    def moved(x: Any, m: Any, v: Any) -> Any:
        return x * (1 - LR * WEIGHT_DECAY) - LR * (m / (1 - a**count)) / (jnp.sqrt(v / (1 - b**count)) + EPS)

    return value, jax.tree.map(moved, p, first, second), first, second
