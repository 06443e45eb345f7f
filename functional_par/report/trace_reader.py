"""Reads the events of a trace file, strictly: plain data whose every number is checked, or an error with its place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from functional_par.errors import ConfigError
from functional_par.pipeline.schedule import KINDS, Action

MOST = 100_000
"""Ranks, stages and microbatches."""
LATEST = 1e18
"""Microseconds."""


@dataclass(frozen=True)
class Reader:
    """Reads plain data, and names the file and the place of what is wrong."""

    file: str

    def wrong(self, where: str, why: str) -> ConfigError:
        return ConfigError(f"{self.file}{f', {where}' if where else ''}: {why}.")

    def parts(self, path: str) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The events of a file, and what it says of itself."""
        data = self.json(path)
        if not isinstance(data, Mapping) or not isinstance(data.get("traceEvents"), list):
            raise self.wrong("", "an object with a list traceEvents is expected, as --trace-file writes it")
        about = data.get("otherData", {})
        if not isinstance(about, Mapping):
            raise self.wrong("otherData", "an object is expected")
        return data["traceEvents"], about

    def json(self, path: str) -> Any:
        def no_number(word: str) -> NoReturn:
            raise ValueError(f"{word} is no number of JSON")

        try:
            with open(path, encoding="utf-8") as file:
                return json.load(file, parse_constant=no_number)
        except OSError as error:
            raise self.wrong("", f"it cannot be read: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise self.wrong("", f"it holds no JSON: {error}") from None

    def action(self, event: Mapping[str, Any], where: str) -> Action:
        args = event.get("args")
        if not isinstance(args, Mapping) or args.get("kind") not in tuple(KINDS):
            raise self.wrong(where, "its args have no kind F, B, I or W")
        stage, microbatch = (self.count(args, key, f"{where}.args", MOST) for key in ("stage", "microbatch"))
        return Action(stage, args["kind"], microbatch)

    def count(self, data: Mapping[str, Any], key: str, where: str, most: int) -> int:
        value = data.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise self.wrong(where, f"{key} is {value!r}; an integer from 0 to {most} is expected")
        return value

    def time(self, data: Mapping[str, Any], key: str, where: str) -> float:
        value = data.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LATEST:
            raise self.wrong(where, f"{key} is {value!r}; microseconds from 0 to {LATEST:g} are expected")
        return float(value)

    def label(self, event: Mapping[str, Any], where: str) -> str:
        args = event.get("args")
        text = args.get("name") if isinstance(args, Mapping) else None
        if not isinstance(text, str) or not text.isprintable():
            raise self.wrong(where, "the name of a row is expected in its args, a text on one line")
        return text
