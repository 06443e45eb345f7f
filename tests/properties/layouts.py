"""What the properties of training draw: a small model of every kind of leaf, a mesh, and a batch with ignored labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import functional_par as fp
from functional_par import Mesh, Model, Param, init

from .single import Batch

VOCAB, EMBED, FFN = 5, 3, 12
"""The vocabulary is padded for each tp but 1, and some of four ranks hold padding alone; ffn is cut evenly by all."""

WIDE = init.normal(0.5)
MODES = ("ALL_REDUCE", "REDUCE_SCATTER")


def chain(blocks: int) -> Model:
    """Embedding, some blocks, head. Leaves that are cut by rows and columns, padded, whole in split compute (``whole``,
    as the keys of few heads are), and read by the stream alone (``norm`` and ``bias``). Gradients flow into the padding."""

    def look_up(p: Any, batch: Batch, par: fp.Par) -> Tensor:
        return fp.nn.embedding(batch["tokens"], p, par, vocab=VOCAB)

    def block(p: Any, x: Tensor, par: fp.Par) -> Tensor:
        up, whole = fp.nn.column_linear(x * p["norm"], (p["up"], p["whole"]), par)  # [batch, seq, ffn / tp], [.., 1]
        return x + fp.nn.row_linear(up.tanh() * whole, p["down"], par, p["bias"])

    def head(p: Any, x: Tensor, par: fp.Par) -> Tensor:
        return fp.nn.column_linear(x.tanh(), p, par).sin()

    def loss(p: Any, y: Tensor, par: fp.Par) -> tuple[Tensor, Tensor]:
        labels = par.batch["labels"]
        kept = labels != -100
        return par.psum((y * (labels * kept + kept).unsqueeze(-1)).sum(), "tp"), kept.sum()

    inside = {
        "norm": Param((EMBED,), "embed", init.uniform(0.5, 1.5)),
        "up": Param((FFN, EMBED), "ffn embed", WIDE),
        "whole": Param((1, EMBED), "kv_heads embed", WIDE),
        "down": Param((EMBED, FFN), "embed ffn", WIDE),
        "bias": Param((EMBED,), "embed", WIDE),
    }
    table = Param((VOCAB, EMBED), "vocab embed", WIDE)
    names = [f"block{i}" for i in range(blocks)]
    params = {"embed": table, **{name: dict(inside) for name in names}, "head": table}
    layers = [("embed", "embed", look_up), *((name, name, block) for name in names), ("head", "head", head)]
    return Model(params, layers, loss)


@dataclass(frozen=True)
class Layout:
    """A program on a mesh, and all that may differ without changing a number."""

    mesh: Mesh
    blocks: int
    split: tuple[int, ...]
    ties: tuple[tuple[str, ...], ...] = ()
    mode: str = "ALL_REDUCE"
    async_comm: bool = False
    schedule: str = "1f1b"
    microbatches: int = 1
    engine: str = "tape"

    def transforms(self) -> list[fp.Transform]:
        return [
            *(fp.tie(*names) for names in self.ties),
            fp.shard_tp(self.mode, self.async_comm),
            fp.stage_pp(self.schedule, self.microbatches, self.split if self.mesh.pp > 1 else None),
            fp.dp_reduce(),
        ]

    def program(self) -> fp.Program:
        return fp.compose(*self.transforms())(chain(self.blocks))

    def but(self, **changes: Any) -> Layout:
        """The same with some changes."""
        return replace(self, **changes)

    @property
    def pieces(self) -> int:
        """What the number of rows is a multiple of."""
        return self.mesh.ep * self.mesh.dp * self.microbatches


def splits(layers: int, stages: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Any numbers of consecutive layers for each stage, at least one."""
    cuts = (
        st.sets(st.integers(1, layers - 1), min_size=stages - 1, max_size=stages - 1) if stages > 1 else st.just(set())
    )
    return cuts.map(lambda found: _lengths([0, *sorted(found), layers]))


def _lengths(bounds: Sequence[int]) -> tuple[int, ...]:
    return tuple(b - a for a, b in pairwise(bounds))


def meshes(most: int, pp: Sequence[int] = (1, 2, 3), tp: Sequence[int] = (1, 2, 3, 4)) -> st.SearchStrategy[Mesh]:
    """Meshes of two ranks or more and at most so many, along all axes but cp."""
    found = [
        Mesh(ep=e, pp=p, dp=d, tp=t)
        for e in (1, 2)
        for p in pp
        for d in (1, 2, 3)
        for t in tp
        if 1 < e * p * d * t <= most
    ]
    return st.sampled_from(found)


@st.composite
def layouts(draw: Callable[..., Any], mesh: st.SearchStrategy[Mesh], microbatches: int = 4, blocks: int = 3) -> Layout:
    """Any layout of a mesh, without ties."""
    drawn = draw(mesh)
    n = draw(st.integers(max(1, drawn.pp - 2), blocks))
    return Layout(
        drawn,
        n,
        draw(splits(n + 2, drawn.pp)),
        (),
        draw(st.sampled_from(MODES)),
        draw(st.booleans()),
        draw(st.sampled_from(("1f1b", "afab"))),
        draw(st.integers(1, microbatches)),
        draw(st.sampled_from(("tape", "tape", "func"))),
    )


def batch_of(seed: int, rows: int, seq: int, ignored_rows: Sequence[int] = ()) -> Batch:
    """Random tokens and labels, a third of them ignored, and all those of some rows."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(VOCAB, (rows, seq), generator=generator) for _ in range(2))
    labels[torch.rand(rows, seq, generator=generator) < 1 / 3] = -100
    for row in ignored_rows:
        labels[row] = -100
    return {"tokens": tokens, "labels": labels}


def sequence(layout: Layout) -> int:
    """A length that tp divides."""
    return 2 * layout.mesh.tp if layout.mesh.tp < 3 else layout.mesh.tp
