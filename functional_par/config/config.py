"""``Config``: the sections of a file, and what they build. Building is pure: no communication, no process group."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from functional_par.config import build, limits, nanotron, reader, schema
from functional_par.config.batch import Batch, resolve
from functional_par.config.rule import Place
from functional_par.config.sections import Sections
from functional_par.mesh import Mesh

if TYPE_CHECKING:
    from functional_par.data import Corpus
    from functional_par.model import Model
    from functional_par.optim import Optimizer
    from functional_par.program import Program


@dataclass(frozen=True)
class Config:
    """A configuration whose keys, types, ranges and sums have been checked.

    Attributes:
        sections: what the file and the flags say, section by section.
        source: the file's name, for messages.
        notes: what of a nanotron file was left aside, and why.

    >>> config = Config.from_dict({
    ...     "parallelism": {"dp": 2, "tp": 2},
    ...     "tokens": {"sequence_length": 16, "train_steps": 10, "global_batch_size": 8, "microbatches": 2},
    ...     "model": {"d_model": 32, "n_layers": 2, "n_heads": 4},
    ... })
    >>> config.mesh(), config.global_batch_size, config.batch.micro_size
    (Mesh(ep=1, pp=1, dp=2, cp=1, tp=2), 8, 2)
    """

    sections: Sections
    source: str = "config"
    notes: tuple[str, ...] = field(default=())

    @classmethod
    def load(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Config:
        """Read a YAML file, ours or nanotron's.

        Args:
            path: the file.
            overrides: dotted keys to values that take the place of the file's, ``{"parallelism.tp": 2}``.

        Raises:
            ConfigError: naming the file, the key, the value and what was expected.
        """
        return cls.from_dict(reader.read(path), str(path), overrides)

    @classmethod
    def from_dict(
        cls,
        data: Mapping[str, Any],
        source: str = "config",
        overrides: Mapping[str, Any] | None = None,
        origins: Mapping[str, str] | None = None,
        whole: bool = True,
    ) -> Config:
        """The same from plain data.

        Args:
            data: sections, as in a file.
            source: what messages call it.
            overrides: as for ``load``.
            origins: what the giver of an override called its key (``--tp``).
            whole: False leaves out ``check``, for who wants one section of a file whose sections do not fit together.
        """
        names: dict[str, str] = {}
        notes: tuple[str, ...] = ()
        if nanotron.is_nanotron(data):
            data, names, notes = nanotron.translate(data, source)
        data = schema.override(Sections, data, overrides or {})
        place = Place(source, origins={**names, **(origins or {})})
        config = cls(schema.build(Sections, data, place), source, notes)
        limits.check_ranks(config.sections.parallelism, source)
        if whole:
            config.check()
        return config

    def check(self) -> None:
        """Raise ConfigError for keys that are fine alone but not together."""
        build.check(self.sections, self.source)
        limits.check_ranks(self.sections.parallelism, self.source)
        limits.check_batch(self.batch, self.source)
        limits.check_tensors(self.sections, self.batch.micro_size, self.source)
        self.optimizer()

    def replace(self, **sections: Any) -> Config:
        """The same with other sections, checked again."""
        config = dataclasses.replace(self, sections=dataclasses.replace(self.sections, **sections))
        config.check()
        return config

    @property
    def _replicas(self) -> int:
        return self.sections.parallelism.ep * self.sections.parallelism.dp

    @cached_property
    def batch(self) -> Batch:
        """How many sequences a step reads and how they are cut."""
        return resolve(self.sections.tokens, self._replicas, self.source)

    @property
    def global_batch_size(self) -> int:
        """Sequences a step, over all replicas."""
        return self.batch.size

    @property
    def microbatches(self) -> int:
        """Microbatches a step on each replica."""
        return self.batch.microbatches

    @property
    def seq_len(self) -> int:
        """Tokens a sequence."""
        return self.sections.tokens.sequence_length

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return self.sections.tokens.train_steps

    @property
    def seed(self) -> int:
        """What initial values are a function of."""
        return self.sections.general.seed

    @property
    def data_seed(self) -> int:
        """What the order of the data is a function of."""
        seed = self.sections.data.seed
        return self.seed if seed is None else seed

    @property
    def clip(self) -> float | None:
        """The largest global gradient norm, or None."""
        return self.sections.optimizer.clip_grad

    @property
    def engine(self) -> str:
        """How layers are differentiated, as ``program.step`` takes it."""
        return self.sections.general.engine

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and activations."""
        return build.DTYPES[self.sections.model.dtype]

    def mesh(self) -> Mesh:
        """The layout of ranks."""
        p = self.sections.parallelism
        return Mesh(ep=p.ep, pp=p.pp, dp=p.dp, cp=p.cp, tp=p.tp)

    def model(self) -> Model:
        """The network, without parallelism."""
        return build.model(self.sections, self.source)

    def program(self) -> Program:
        """The network under the transforms that the file asks for. Raises whatever ``compose`` raises."""
        return build.program(self.sections, self.batch, self.source)

    def optimizer(self) -> Optimizer:
        """The optimizer with its learning-rate schedule."""
        return build.optimizer(self.sections, self.source)

    def corpus(self) -> Corpus:
        """The text or tokens to read. Raises DataError for an unusable file, ConfigError for ids the model lacks."""
        return build.corpus(self.sections, self.source)
