"""Who races in which layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from math import prod
from types import MappingProxyType
from typing import Any

from .setting import LAYOUTS, Contender
from .variants import VARIANTS

USUAL = "usual"
"""Stands for those who race if nobody is named."""

Parts = Sequence[tuple[str, Mapping[str, Any]]]
TENSOR: Parts = (
    ("dtensor lp", {"tp": "plain", "loss_parallel": True}),
    ("dtensor sp lp", {"tp": "sp", "loss_parallel": True}),
    ("dtensor", {"tp": "plain"}),
    ("dtensor sp", {"tp": "sp"}),
)
"""Torch's tensor parallelism: DTensor, with the stream cut on the sequence (sp), with loss_parallel (lp)."""
PIPELINE: Parts = (
    ("interleaved 3+2+2+1", {"pp": "interleaved", "split": (3, 2, 2, 1)}),
    ("1f1b 5+3", {"pp": "1f1b", "split": (5, 3)}),
    ("interleaved", {"pp": "interleaved", "split": (2, 2, 2, 2)}),
    ("1f1b", {"pp": "1f1b", "split": (4, 4)}),
    ("zbv", {"pp": "zbv", "split": (2, 2, 2, 2)}),
    ("zbv 2+2+3+1", {"pp": "zbv", "split": (2, 2, 3, 1)}),
    ("interleaved-zb", {"pp": "interleaved-zb", "split": (2, 2, 2, 2)}),
    ("dualpipev", {"pp": "dualpipev", "split": (2, 2, 2, 2)}),
)
"""Torch's schedules, with as many blocks on every stage, or fewer where the head is."""
DATA: Parts = (("ddp", {"dp": "ddp"}), ("allreduce", {"dp": "allreduce"}), ("fsdp2", {"dp": "fsdp2"}))
"""Torch's data parallelism, and by hand one all-reduce of a flat copy of all gradients."""
COMPOSED: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "tp2xpp2": ("dtensor lp interleaved 3+2+2+1", "dtensor lp 1f1b 5+3", "dtensor sp lp interleaved 3+2+2+1"),
        "dp2xtp2": ("dtensor lp allreduce", "dtensor sp lp allreduce", "dtensor sp lp fsdp2"),
        "dp2xpp2": ("1f1b 5+3 ddp", "1f1b ddp", "interleaved 3+2+2+1 allreduce", "1f1b 5+3 fsdp2"),
        "2x2x2": ("dtensor lp 1f1b 5+3 allreduce", "dtensor sp lp interleaved 3+2+2+1 allreduce"),
    }
)
"""Of torch's parts together, those that usually race: of each kind the fastest."""


def contenders(layout: str) -> list[Contender]:
    """Everyone who can race in a layout. They start in this order, so if memory runs out it is the last who stay out."""
    ours = list(_ours(layout))
    plain = [each for each in ours if not each.options["variant"]]
    return [*_limits(layout), *plain, *_torch(layout), *_jax(layout), *(each for each in ours if each not in plain)]


def chosen(layout: str, patterns: Sequence[str]) -> list[Contender]:
    """Those whose name matches one of the patterns, such as ``ours*``; the pattern ``usual`` is for those who usually race."""
    return [
        each
        for each in contenders(layout)
        if (each.usual and USUAL in patterns) or any(fnmatchcase(each.who, pattern) for pattern in patterns)
    ]


def _limits(layout: str) -> Iterator[Contender]:
    ranks = prod(LAYOUTS[layout].values())
    if ranks == 1:
        yield Contender("limit", layout, "limit")
    if ranks <= 2:
        yield Contender("limit 2 threads", layout, "limit", threads=2)


def _ours(layout: str) -> Iterator[Contender]:
    axes = LAYOUTS[layout]
    ranks = prod(axes.values())
    for variant in VARIANTS:
        if all(axes.get(axis, 1) > 1 for axis in variant.needs):
            name, given = f" {variant.name}".rstrip(), {"options": {"variant": variant.name}, "usual": variant.usual}
            if ranks == 1:
                yield Contender(f"ours{name}", layout, "ours", **given)
                continue
            yield Contender(f"ours gloo{name}", layout, "ours", processes=ranks, **given)
            yield Contender(f"ours threads{name}", layout, "ours", threads=ranks, inside=ranks, threaded=True, **given)


def _torch(layout: str) -> Iterator[Contender]:
    axes = LAYOUTS[layout]
    if not axes:
        yield Contender("torch compile", layout, "limit", {"compile": True})
        return
    for parts in product(*(parts for axis, parts in (("tp", TENSOR), ("pp", PIPELINE), ("dp", DATA)) if axis in axes)):
        name, options = " ".join(name for name, _ in parts), {k: v for _, given in parts for k, v in given.items()}
        if _works(options):
            usual = name in COMPOSED.get(layout, [name])
            yield Contender(f"torch {name}", layout, "torch_parts", options, usual, processes=prod(axes.values()))


def _works(options: Mapping[str, Any]) -> bool:
    """DDP around DTensors does not reduce their gradients and says nothing; around two stages of a rank it fails within
    (rebuilt parameter indices size is not same as original model parameters size)."""
    return options.get("dp") != "ddp" or ("tp" not in options and options.get("pp") in (None, "1f1b"))


def _jax(layout: str) -> Iterator[Contender]:
    ranks = prod(LAYOUTS[layout].values())
    yield Contender("jax shard_map" if ranks > 1 else "jax", layout, "jax_parts", threads=1, inside=ranks)
