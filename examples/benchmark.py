"""Time our step beside a hand-written torch loop of the same model, interleaved in one run.

    python examples/benchmark.py --model 33m --rounds 7 --json out.json

Every contender is a process of its own with one thread, so that peak memory is its own; the parent lets them take turns, one
step each, so that both see the same machine. `limit` is what one would write by hand: autograd.grad and fused AdamW.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import functional_par as fp
from functional_par.tree import flatten, unflatten

MODELS: dict[str, dict[str, int]] = {
    "33m": {"vocab": 8192, "d_model": 512, "n_layers": 8, "n_heads": 8, "d_ff": 1376, "seq_len": 256},
    "tiny": {"vocab": 512, "d_model": 64, "n_layers": 8, "n_heads": 4, "d_ff": 176, "seq_len": 64},
}
ROWS = 8
CLIP = 1.0
Step = Callable[[], float]


def batch_of(sizes: dict[str, int]) -> dict[str, Tensor]:
    """Random tokens and their successors: int64 [rows, seq]."""
    text = torch.randint(sizes["vocab"], (ROWS, sizes["seq_len"] + 1), generator=torch.Generator().manual_seed(0))
    return {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


def limit(sizes: dict[str, int]) -> Step:
    """The hand-written loop: plain torch functions, autograd.grad, clipping, fused AdamW."""
    params = {k: v.requires_grad_() for k, v in flatten(fp.models.llama(**sizes).init(0)).items()}
    optimizer = torch.optim.AdamW(params.values(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    batch = batch_of(sizes)

    def step() -> float:
        loss = plain_llama(unflatten(params), batch, sizes)
        for leaf, grad in zip(params.values(), torch.autograd.grad(loss, list(params.values())), strict=True):
            leaf.grad = grad
        torch.nn.utils.clip_grad_norm_(params.values(), CLIP, foreach=True)
        optimizer.step()
        return loss.item()

    return step


def plain_llama(p: dict[str, Any], batch: dict[str, Tensor], sizes: dict[str, int]) -> Tensor:
    """The same llama in plain torch."""
    x = F.embedding(batch["tokens"], p["embed"]["weight"])  # batch seq embed
    embed, head = x.shape[-1], x.shape[-1] // sizes["n_heads"]
    angles = torch.outer(torch.arange(x.shape[1]), 10000.0 ** (-torch.arange(0, head, 2) / head))
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)  # seq head

    def heads(y: Tensor, weight: Tensor) -> Tensor:
        return (
            F.linear(y, weight.view(embed, embed)).view(*y.shape[:2], -1, head).transpose(1, 2)
        )  # batch heads seq head

    def turn(y: Tensor) -> Tensor:
        first, second = y.chunk(2, -1)
        return y * cos + torch.cat([-second, first], -1) * sin

    for block in p["blocks"].values():
        y = F.rms_norm(x, (embed,), block["norm1"]["weight"], 1e-5)
        q, k, v = (heads(y, block["attn"][name]["weight"]) for name in "qkv")
        y = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        x = x + F.linear(y.transpose(1, 2).reshape(x.shape), block["attn"]["out"]["weight"].view(embed, embed))
        y = F.rms_norm(x, (embed,), block["norm2"]["weight"], 1e-5)
        mlp = block["mlp"]
        x = x + F.linear(
            F.silu(F.linear(y, mlp["gate"]["weight"])) * F.linear(y, mlp["up"]["weight"]), mlp["down"]["weight"]
        )
    logits = F.linear(F.rms_norm(x, (embed,), p["norm"]["weight"], 1e-5), p["head"]["weight"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def ours(engine: str) -> Callable[[dict[str, int]], Step]:
    """The library's step on a mesh of one rank, with the given differentiation engine."""

    def start(sizes: dict[str, int]) -> Step:
        program = fp.compose(fp.shard_tp(), fp.stage_pp(), fp.dp_reduce())(fp.models.llama(**sizes))
        batch, hold = batch_of(sizes), {}

        def main(world: fp.World) -> None:
            optimizer = fp.optim.adamw(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.01)
            hold["step"] = program.step(world, optimizer, clip=CLIP, donate=True, engine=engine)
            hold["state"] = hold["step"].init(0)

        fp.run(main, fp.Mesh())

        def step() -> float:
            hold["state"], metrics = hold["step"](hold["state"], batch)
            return metrics["loss"]

        return step

    return start


CONTENDERS = {"limit": limit, "ours": ours("func"), "ours tape": ours("tape")}


def work(pipe: Connection, who: str, sizes: dict[str, int]) -> None:
    """A contender's process: one step at each request; answers with (seconds, loss, peak memory in MB)."""
    torch.set_num_threads(1)
    step = CONTENDERS[who](sizes)
    pipe.send("ready")
    while pipe.recv():
        start = time.perf_counter()
        loss = step()
        pipe.send((time.perf_counter() - start, loss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000))


def race(sizes: dict[str, int], names: list[str], rounds: int) -> dict[str, list[tuple[float, float, float]]]:
    """Let the contenders take turns; the first two rounds warm up and are not counted."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for who in names:
        pipes[who], child = context.Pipe()
        context.Process(target=work, args=(child, who, sizes), daemon=True).start()
        pipes[who].recv()
    results: dict[str, list[tuple[float, float, float]]] = {who: [] for who in names}
    for i in range(rounds + 2):
        for who, pipe in pipes.items():
            pipe.send(True)
            results[who].append(pipe.recv())
        shown = "  ".join(f"{who} {runs[-1][0] * 1000:.0f} ms" for who, runs in results.items())
        print(f"{'warm-up' if i < 2 else f'round {i - 1} of {rounds}'}: {shown}", file=sys.stderr)
    for pipe in pipes.values():
        pipe.send(False)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="33m")
    parser.add_argument("--rounds", type=int, default=7, help="counted steps of each contender")
    parser.add_argument("--who", default=",".join(CONTENDERS), help="contenders, separated by commas")
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    args = parser.parse_args()
    results = race(MODELS[args.model], args.who.split(","), args.rounds)
    rows = []
    for who, runs in results.items():
        times = [seconds * 1000 for seconds, _, _ in runs[2:]]
        spread = max(times) - min(times)
        row = {"model": args.model, "layout": "one", "who": who, "ms": statistics.median(times), "spread": spread}
        rows.append(row | {"rss_mb": runs[-1][2], "loss": runs[-1][1]})
    table = Table("model", "layout", "who", "ms", "spread", "peak MB", "time", "memory", title="one step, medians")
    for row in rows:
        ratios = f"{row['ms'] / rows[0]['ms']:.3f}x", f"{row['rss_mb'] / rows[0]['rss_mb']:.3f}x"
        table.add_row(
            row["model"],
            row["layout"],
            row["who"],
            f"{row['ms']:.1f}",
            f"{row['spread']:.1f}",
            f"{row['rss_mb']:.0f}",
            *ratios,
        )
    Console().print(table)
    losses = {round(row["loss"], 4) for row in rows}
    print(f"last loss of everyone: {losses.pop()}" if len(losses) == 1 else f"losses differ: {losses}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
