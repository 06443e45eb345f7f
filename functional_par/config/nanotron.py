"""Reads a whole nanotron configuration. Its ``parallelism``, ``tokens`` and ``optimizer`` sections need no translation;
``nanotron_keys`` says what becomes of every other key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from functional_par.config import nanotron_keys as keys
from functional_par.config.nanotron_keys import Aside, Move, Rule
from functional_par.config.rule import Place
from functional_par.config.words import shown, unknown_key
from functional_par.errors import ConfigError


@dataclass
class _Translation:
    """What has been translated so far. Lives for one call of ``translate``."""

    source: str
    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    aside: dict[str, list[str]] = field(default_factory=dict)

    def put(self, to: str, value: Any, origin: str) -> None:
        section, name = to.split(".")
        self.data.setdefault(section, {})[name] = value
        self.origins[to] = origin

    def note(self, path: str, rule: Aside, value: Any) -> None:
        if not any(value is quiet or (value == quiet and type(value) is type(quiet)) for quiet in rule.quiet):
            self.aside.setdefault(rule.why, []).append(path)

    def section(self, rules: Mapping[str, Rule], data: Any, path: str) -> None:
        at = Place(self.source, path)
        if data is not None and not isinstance(data, Mapping):
            raise ConfigError(f"{at}: got {shown(data)}; expected a section.")
        data = data or {}
        for name in data:
            if name not in rules:
                raise unknown_key(at, name, list(rules))
        for name, rule in rules.items():
            self.one(rule, data.get(name), name in data, f"{path}.{name}")

    def one(self, rule: Rule, value: Any, given: bool, path: str) -> None:
        if isinstance(rule, Move):
            value = rule.default if value is None else value
            if given or rule.default is not None:
                self.put(rule.to, value, path)
        elif isinstance(rule, Aside):
            self.note(path, rule, value)
        elif given and not any(value is v or value == v for v in rule.values):
            allowed = " or ".join(shown(v) for v in rule.values)
            raise ConfigError(f"{self.source}: {path}: {shown(value)}: {rule.why}. Set it to {allowed}.")


def is_nanotron(data: Mapping[str, Any]) -> bool:
    """Whether a file is nanotron's: it says ``model.model_config`` or ``data_stages``."""
    model = data.get("model")
    return "data_stages" in data or (isinstance(model, Mapping) and "model_config" in model)


def translate(data: Mapping[str, Any], source: str) -> tuple[dict[str, Any], dict[str, str], tuple[str, ...]]:
    """A nanotron file as ours: its data, what each moved key was called, and notes about what was left aside.

    Raises:
        ConfigError: for a key that neither nanotron nor this library has, or a value that would change the result.
    """
    out = _Translation(source)
    known = [*keys.SECTIONS_SHARED, "model", *keys.SECTIONS, "data_stages", *keys.SECTIONS_ASIDE]
    for name, value in data.items():
        if name not in known:
            raise unknown_key(Place(source), name, known)
        if name in keys.SECTIONS_SHARED:
            out.data[name] = dict(value) if isinstance(value, Mapping) else value
        elif name in keys.SECTIONS_ASIDE:
            out.note(name, keys.SECTIONS_ASIDE[name], value)
    for name, rules in keys.SECTIONS.items():
        out.section(rules, data.get(name), name)
    _model(out, data.get("model"))
    _stages(out, data.get("data_stages"))
    notes = [f"{', '.join(paths)}: left aside, {why}" for why, paths in out.aside.items()]
    return out.data, out.origins, tuple(notes)


def _model(out: _Translation, data: Any) -> None:
    rest = dict(data) if isinstance(data, Mapping) else {}
    config, start = rest.pop("model_config", None), rest.pop("init_method", None)
    if not isinstance(config, Mapping):
        raise ConfigError(f"{out.source}: model.model_config: got {shown(config)}; expected a llama or qwen2 section.")
    out.put("model.name", "llama", "model.model_config")
    out.section(keys.MODEL, rest, "model")
    out.section(keys.INIT_METHOD, start, "model.init_method")
    out.section(keys.MODEL_CONFIG, config, "model.model_config")
    _positions(out, config.get("max_position_embeddings"))


def _positions(out: _Translation, limit: Any) -> None:
    tokens = out.data.get("tokens")
    length = tokens.get("sequence_length") if isinstance(tokens, Mapping) else None
    if isinstance(limit, int) and isinstance(length, int) and length > limit:
        raise ConfigError(
            f"{out.source}: tokens.sequence_length={length} is beyond "
            f"model.model_config.max_position_embeddings={limit}. Take at most {limit}."
        )


def _stages(out: _Translation, stages: Any) -> None:
    if stages is None:
        return
    if not isinstance(stages, list) or not stages:
        raise ConfigError(f"{out.source}: data_stages: got {shown(stages)}; expected a list of sections.")
    if len(stages) > 1:
        raise ConfigError(f"{out.source}: data_stages has {len(stages)} stages; only one is available yet. Keep one.")
    at = Place(out.source, "data_stages.0")
    stage = _known(stages[0], keys.STAGE_KEYS, at)
    data = _known(stage.get("data") or {}, keys.DATA_KEYS, at / "data")
    _merge(out, "tokens", "sequence_length", stage.get("sequence_length"), at / "sequence_length")
    _merge(out, "data", "seed", data.get("seed"), at / "data" / "seed")
    out.note("data_stages.0.data.dataset", keys.DATASET, data.get("dataset"))


def _known(data: Any, names: tuple[str, ...], at: Place) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{at}: got {shown(data)}; expected a section.")
    for name in data:
        if name not in names:
            raise unknown_key(at, name, list(names))
    return data


def _merge(out: _Translation, section: str, name: str, value: Any, at: Place) -> None:
    """Move a stage's key into a section that the file may have too; they must agree."""
    held = out.data.setdefault(section, {})
    if value is None or not isinstance(held, dict):
        return
    if held.get(name, value) != value:
        raise ConfigError(f"{at}: got {shown(value)}, but {section}.{name} is {shown(held[name])}. Make them equal.")
    out.put(f"{section}.{name}", value, at.path)
