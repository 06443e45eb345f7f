"""Who races in which layout."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from .setting import LAYOUTS, Contender
from .variants import VARIANTS

USUAL = ("limit*", "torch*", "jax*", "ours", "ours gloo", "ours threads", "ours* tape", "ours* rs")
"""Patterns of those that race if nobody is named."""


def contenders(layout: str) -> list[Contender]:
    """Everyone who can race in a layout."""
    return [*_limits(layout), *_torch(layout), *_jax(layout), *_ours(layout)]


def chosen(layout: str, patterns: list[str]) -> list[Contender]:
    """Those whose name matches one of the patterns, such as ``ours*``."""
    return [each for each in contenders(layout) if any(fnmatchcase(each.who, pattern) for pattern in patterns)]


def _limits(layout: str) -> Iterator[Contender]:
    ranks = prod(LAYOUTS[layout].values())
    if ranks == 1:
        yield Contender("limit", layout, "limit")
        yield Contender("torch compile", layout, "limit", {"compile": True})
    if ranks <= 2:
        yield Contender("limit 2 threads", layout, "limit", threads=2)


def _ours(layout: str) -> Iterator[Contender]:
    axes = LAYOUTS[layout]
    ranks = prod(axes.values())
    for variant in VARIANTS:
        if all(axes.get(axis, 1) > 1 for axis in variant.needs):
            name, options = f" {variant.name}".rstrip(), {"variant": variant.name}
            if ranks == 1:
                yield Contender(f"ours{name}", layout, "ours", options)
                continue
            yield Contender(f"ours gloo{name}", layout, "ours", options, processes=ranks)
            yield Contender(f"ours threads{name}", layout, "ours", options, threads=ranks, inside=ranks, threaded=True)


def _torch(layout: str) -> Iterator[Contender]:
    axes = LAYOUTS[layout]
    if axes:
        for tp in TENSOR if "tp" in axes else [("", {})]:
            for pp in PIPELINE if "pp" in axes else [("", {})]:
                for dp in DATA if "dp" in axes else [("", {})]:
                    options = {**tp[1], **pp[1], **dp[1]}
                    if _fits(options):
                        name = " ".join(["torch", *filter(None, (tp[0], pp[0], dp[0]))])
                        yield Contender(name, layout, "torch_parts", options, processes=prod(axes.values()))


def _fits(options: dict[str, Any]) -> bool:
    # DDP around DTensors does not reduce their gradients and says nothing.
    return not (options.get("dp") == "ddp" and "tp" in options)


def _jax(layout: str) -> Iterator[Contender]:
    yield from ()


Options = list[tuple[str, dict[str, Any]]]
TENSOR: Options = [
    ("dtensor", {"tp": "plain"}),
    ("dtensor lp", {"tp": "plain", "loss_parallel": True}),
    ("dtensor sp", {"tp": "sp"}),
    ("dtensor sp lp", {"tp": "sp", "loss_parallel": True}),
]
PIPELINE: Options = [
    ("1f1b", {"pp": "1f1b", "split": [4, 4]}),
    ("1f1b 5+3", {"pp": "1f1b", "split": [5, 3]}),
    ("interleaved", {"pp": "interleaved", "split": [2, 2, 2, 2]}),
    ("interleaved 3+2+2+1", {"pp": "interleaved", "split": [3, 2, 2, 1]}),
    ("interleaved-zb", {"pp": "interleaved-zb", "split": [2, 2, 2, 2]}),
    ("zbv", {"pp": "zbv", "split": [2, 2, 2, 2]}),
    ("dualpipev", {"pp": "dualpipev", "split": [2, 2, 2, 2]}),
]
DATA: Options = [("ddp", {"dp": "ddp"}), ("fsdp2", {"dp": "fsdp2"}), ("allreduce", {"dp": "allreduce"})]
