"""Ways to run ours: one line each says what the transforms and the step are given. Add a line to race another option."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import functional_par as fp


@dataclass(frozen=True)
class Variant:
    """One way to run ours.

    Attributes:
        name: what follows ``ours gloo`` or ``ours threads``; empty for the defaults.
        needs: axes that have to be larger than 1.
        tp, pp, dp: for ``fp.shard_tp``, ``fp.stage_pp`` and ``fp.dp_reduce``.
        step: for ``program.step``.
        more: other transforms.
        usual: it races if nobody is named.
    """

    name: str
    needs: tuple[str, ...] = ()
    tp: Mapping[str, Any] = field(default_factory=dict)
    pp: Mapping[str, Any] = field(default_factory=dict)
    dp: Mapping[str, Any] = field(default_factory=dict)
    step: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[], list[fp.Transform]] = list
    usual: bool = False


VARIANTS: tuple[Variant, ...] = (
    Variant("", usual=True),
    Variant("tape", step={"engine": "tape"}, usual=True),
    Variant("rs", needs=("tp",), tp={"mode": "REDUCE_SCATTER"}, usual=True),
    Variant("rs tape", needs=("tp",), tp={"mode": "REDUCE_SCATTER"}, step={"engine": "tape"}),
    Variant("async", needs=("tp",), tp={"async_comm": True}),
    Variant("rs async", needs=("tp",), tp={"mode": "REDUCE_SCATTER", "async_comm": True}),
    Variant("compile", step={"engine": "compile"}),
    Variant("zero1", needs=("dp",), dp={"zero": 1}),
    Variant("zero2", needs=("dp",), dp={"zero": 2}),
    Variant("zero3", needs=("dp",), dp={"zero": 3}),
    Variant("remat", more=lambda: [fp.remat("full")]),
    Variant("remat selective", more=lambda: [fp.remat("selective")]),
    Variant("zb-1p", needs=("pp",), pp={"schedule": "zb-1p"}),
    Variant("1f1b", needs=("pp",), pp={"schedule": "1f1b"}),
    Variant("interleaved", needs=("pp",), pp={"schedule": "interleaved"}),
    Variant("zb-h1", needs=("pp",), pp={"schedule": "zb-h1"}),
    Variant("zbv", needs=("pp",), pp={"schedule": "zbv"}),
    Variant("interleaved-zb", needs=("pp",), pp={"schedule": "interleaved-zb"}),
    Variant("dualpipev", needs=("pp",), pp={"schedule": "dualpipev"}),
)


def variant(name: str) -> Variant:
    """The variant of that name."""
    return next(each for each in VARIANTS if each.name == name)
