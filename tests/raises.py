"""A plugin of pytest that knows which error messages of the package a test has matched on their text.

``pytest.raises(X, match=...)`` and ``info.match(...)`` are noted; for a text that a test caught or read elsewhere there is
``matched``. A message counts if a pattern that matched it fits no other message of the run: "tp" tells nothing apart.
After a whole run the messages that no test has matched are listed, and the run fails. ``--raises-report FILE`` writes the
list of any run.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import functional_par
from functional_par.errors import ParallelError

from .messages import Package, Site

ROOT = Path(functional_par.__file__).parent
Place = tuple[str, int]
"""A file and a line."""


Calls = tuple[Place, ...]
"""Where an error was made: the line of the innermost call and those of its callers, as far as they are in the package."""


@dataclass(frozen=True)
class Note:
    """A pattern that matched a message, and where the error and those that it retells were made. Nothing is known of a text
    without its error."""

    pattern: str
    message: str
    made: tuple[Calls, ...]


class Shown(Exception):
    """A text of which all that is known is that the package has shown it."""


def matched(shown: BaseException | str, words: str) -> None:
    """Assert that an error that was caught, or a text that was read, has these words, and note it as ``match=`` would."""
    error = shown if isinstance(shown, BaseException) else Shown(shown)
    with pytest.raises(type(error), match=re.escape(words)):
        raise error


class Notes:
    """What has been matched in this process."""

    def __init__(self) -> None:
        self.made: dict[tuple[str, Calls | str], Note] = {}

    def add(self, error: BaseException, pattern: str | re.Pattern[str] | None) -> None:
        """Note that the text of an error has matched."""
        pattern = pattern if isinstance(pattern, str | None) else pattern.pattern
        if not pattern:
            return
        text = isinstance(error, Shown)
        key = pattern, str(error) if text else _calls(error)
        if key not in self.made:
            self.made[key] = Note(pattern, str(error)[:4000], () if text else tuple(_retold(error, pattern)))


class _Raises:
    """What ``pytest.raises`` returns, and a note of what it matched."""

    def __init__(self, inner: Any, notes: Notes, pattern: Any) -> None:
        self.inner, self.notes, self.pattern = inner, notes, pattern

    def __enter__(self) -> Any:
        return self.inner.__enter__()

    def __exit__(self, *raised: Any) -> Any:
        caught = self.inner.__exit__(*raised)
        if caught:
            self.notes.add(raised[1], self.pattern)
        return caught


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--raises-report", metavar="FILE", help="list the error messages that no test has matched")


def pytest_configure(config: pytest.Config) -> None:
    """Listen to errors and to matches, for as long as this pytest runs."""
    notes, patch = Notes(), pytest.MonkeyPatch()
    config.stash[_NOTES], config.stash[_OTHERS] = notes, []
    if not hasattr(config, "workerinput") and (config.getoption("--raises-report") or _is_whole(config)):
        config.stash[_SITES] = Package(ROOT).sites()  # of the source that is about to be imported
    config.add_cleanup(patch.undo)
    raises, match = pytest.raises, pytest.ExceptionInfo.match

    def noting_raises(expected: Any = None, *args: Any, **options: Any) -> Any:
        inner = raises(*([] if expected is None else [expected]), *args, **options)
        return inner if args else _Raises(inner, notes, options.get("match"))

    def noting_match(info: Any, pattern: Any) -> Any:
        result = match(info, pattern)
        notes.add(info.value, pattern)
        return result

    def noting_init(error: ParallelError, *args: Any) -> None:
        Exception.__init__(error, *args)
        error.__dict__["made_at"] = tuple(_own_frames(sys._getframe(1)))

    patch.setattr(pytest, "raises", noting_raises)
    patch.setattr(pytest.ExceptionInfo, "match", noting_match)
    patch.setattr(ParallelError, "__init__", noting_init)


_NOTES = pytest.StashKey[Notes]()
_OTHERS = pytest.StashKey[list[Note]]()
_SITES = pytest.StashKey[tuple[Site, ...]]()
_MISSED = pytest.StashKey[tuple[str, ...]]()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """A worker of xdist hands in its notes."""
    for note in getattr(node, "workeroutput", {}).get("raises", ()):
        node.config.stash[_OTHERS].append(_note_of(note))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    notes = [*config.stash[_NOTES].made.values(), *config.stash[_OTHERS]]
    if hasattr(config, "workeroutput"):
        config.workeroutput["raises"] = [(note.pattern, note.message, note.made) for note in notes]
        return
    found = missed(config.stash.get(_SITES, ()), notes)
    if report := config.getoption("--raises-report"):
        Path(report).write_text("".join(f"{line}\n" for line in found))
    if found and _is_whole(config) and exitstatus == 0:
        config.stash[_MISSED] = found
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if found := config.stash.get(_MISSED, ()):
        terminalreporter.section("error messages that no test matches on words of their own")
        for line in found:
            terminalreporter.line(line)


def _is_whole(config: pytest.Config) -> bool:
    chosen = [config.getoption(name, None) for name in ("keyword", "markexpr", "deselect", "ignore", "ignore_glob")]
    return sorted(config.args) == sorted(config.getini("testpaths")) and not any(chosen)


def missed(sites: Iterable[Site], notes: Iterable[Note]) -> tuple[str, ...]:
    """What is wrong: messages that no test matches, or that no pattern tells from others."""
    sites, notes = tuple(sites), tuple(notes)
    told = {note: frozenset(_told(note, sites)) for note in notes}
    touched = {note: frozenset(_touched(note, sites, told[note])) for note in notes}
    present = {note: told[note] | touched[note] for note in notes}
    searches = {pattern: re.compile(pattern) for pattern in {note.pattern for note in notes}}
    fitting = {p: [note for note in notes if search.search(note.message)] for p, search in searches.items()}
    found = []
    for site in sites:
        patterns = {note.pattern for note in notes if site in touched[note]}
        if not patterns:
            found.append(f"{site}: no test")
        elif site.letters and not any(all(_alike(site, present[n]) for n in fitting[p]) for p in patterns):
            found.append(f"{site}: no words of its own in {', '.join(map(repr, sorted(patterns)))}")
    return tuple(found)


def _alike(site: Site, others: Iterable[Site]) -> bool:
    """One of the others is the site, or has just its words."""
    return any(site.parts == other.parts for other in others)


def _told(note: Note, sites: Iterable[Site]) -> Iterator[Site]:
    """The texts whose words a message has; the places too, if it is not known where their words were put together."""
    placed = [site for calls in note.made for site in _placed(calls, sites)]
    least = {"text": 4, "place": 12 if not note.made or any(not site.letters for site in placed) else math.inf}
    return (site for site in sites if site.letters >= least[site.kind] and any(site.spans(note.message)))


def _touched(note: Note, sites: Iterable[Site], told: Iterable[Site]) -> Iterator[Site]:
    """The sites of a message that was matched: where it was made, and those on whose words the pattern lies."""
    spans = [match.span() for match in re.finditer(note.pattern, note.message)]
    for site in told:
        if _overlap(spans, site.spans(note.message)):
            yield site
    for calls in note.made:
        yield from _placed(calls, sites)


def _overlap(spans: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> bool:
    others = list(others)
    return any(first < end and start < last for first, last in spans for start, end in others)


def _placed(calls: Calls, sites: Iterable[Site]) -> Iterator[Site]:
    """The place on the innermost line, and those of the helpers' callers, as long as each line is a place."""
    for file, line in calls:
        here = [s for s in sites if s.kind == "place" and s.file == file and s.first <= line <= s.last]
        if not here:
            return
        yield min(here, key=lambda site: site.last - site.first)


def _retold(error: BaseException, pattern: str) -> Iterator[Calls]:
    """Where an error was made, and those from which it was made, if the pattern lies on their part of its text."""
    text = str(error)
    spans = [match.span() for match in re.finditer(pattern, text)]
    for told in _chain(error):
        start = text.find(str(told))
        if start >= 0 and _overlap(spans, [(start, start + len(str(told)))]):
            yield _calls(told)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those during which it was raised, each once: a chain may be a ring."""
    seen: list[BaseException] = []
    while error is not None and not any(error is known for known in seen):
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def _calls(error: BaseException) -> Calls:
    """Where an error was made; one that is not the package's own, where it was raised."""
    if (made := getattr(error, "made_at", None)) is not None:
        return made
    trace, last = error.__traceback__, None
    while trace is not None:
        trace, last = trace.tb_next, trace
    return tuple(_own_frames(last.tb_frame, last.tb_lineno)) if last else ()


def _own_frames(frame: FrameType | None, line: int | None = None) -> Iterator[Place]:
    while frame is not None and frame.f_code.co_filename.startswith(str(ROOT)):
        yield Path(frame.f_code.co_filename).relative_to(ROOT.parent).as_posix(), line or frame.f_lineno
        frame, line = frame.f_back, None


def _note_of(sent: tuple[str, str, list[list[Place]]]) -> Note:
    """A note that a worker has sent, with its lists as tuples again."""
    pattern, message, made = sent
    return Note(pattern, message, tuple(tuple((file, line) for file, line in calls) for calls in made))
