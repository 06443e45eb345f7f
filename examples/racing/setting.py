"""What every contender has in common: sizes of the models, layouts, batch, optimizer and clipping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any

MODELS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "33m": {"vocab": 8192, "d_model": 512, "n_layers": 8, "n_heads": 8, "d_ff": 1376, "seq_len": 256},
        "tiny": {"vocab": 512, "d_model": 64, "n_layers": 8, "n_heads": 4, "d_ff": 176, "seq_len": 64},
    }
)
LAYOUTS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "one": {},
        "tp2": {"tp": 2},
        "pp2": {"pp": 2},
        "dp2": {"dp": 2},
        "tp2xpp2": {"pp": 2, "tp": 2},
        "dp2xtp2": {"dp": 2, "tp": 2},
        "dp2xpp2": {"dp": 2, "pp": 2},
        "2x2x2": {"dp": 2, "pp": 2, "tp": 2},
    }
)
ROWS = 8
MICROBATCHES = 4
"""With pipeline stages."""
CLIP = 1.0
LR, BETAS, EPS, WEIGHT_DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.01


@dataclass(frozen=True)
class Contender:
    """One way to train the model in a layout.

    Attributes:
        who: its name in the table; the first word says whose it is.
        layout: one of ``LAYOUTS``.
        module: under ``racing``; its ``main(job, serve)`` runs in every process.
        options: for that module.
        usual: it races if nobody is named.
        processes: one for each rank, or one for all.
        threads: of each process, all its ranks together.
        inside: ranks in each process.
        threaded: these are threads that each serve.
    """

    who: str
    layout: str
    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    usual: bool = True
    processes: int = 1
    threads: int = 1
    inside: int = 1
    threaded: bool = False

    @property
    def ranks(self) -> int:
        return prod(LAYOUTS[self.layout].values())


@dataclass(frozen=True)
class Job:
    """What a process of a contender does.

    Attributes:
        contender: whose process it is.
        sizes: of the model, by the names of ``fp.models.llama``.
        rank: of this process among the contender's processes.
    """

    contender: Contender
    sizes: Mapping[str, int]
    rank: int = 0

    @property
    def options(self) -> Mapping[str, Any]:
        return self.contender.options

    def axis(self, name: str) -> int:
        """Size of an axis of the layout."""
        return LAYOUTS[self.contender.layout].get(name, 1)

    @property
    def microbatches(self) -> int:
        return MICROBATCHES if self.axis("pp") > 1 else 1
