"""Break the library in many ways and show that the suite notices each: ``python -m tests.mutation [words of a name ...]``.

Every mutant is a copy of the repository with one edit, in a temporary folder, on which the tests run that are expected to
notice, a file after the other; should none, the whole suite. Two mutants at a time. Prints a table; exit status 1 if a mutant
survives.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.mutation.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
COPIED = ("functional_par", "tests", "examples", "specs", "pyproject.toml", "README.md")
LIMIT = 1800.0
"""Seconds for one run of tests; one that hangs is noticed too."""

JOBS = 2
"""Mutants at a time."""


class Verdict(NamedTuple):
    """What became of a mutant: the test that failed, or "" if it survives."""

    mutant: Mutant
    killer: str
    seconds: float


def mutated(folder: Path, mutant: Mutant) -> None:
    """A copy of the repository with the mutant's edit."""
    for name in COPIED:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, folder / name)
    path = folder / "functional_par" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: its text occurs {text.count(mutant.old)} times in {mutant.file}, not once.")
    path.write_text(text.replace(mutant.old, mutant.new))


def judge(mutant: Mutant) -> Verdict:
    """Run the tests on the mutant."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mutated(folder, mutant)
        places = ((place,) for place in mutant.tests)
        killer = next(filter(None, (failing(folder, tests) for tests in (*places, ()))), "")
    return Verdict(mutant, killer, time.monotonic() - begin)


def failing(folder: Path, tests: tuple[str, ...]) -> str:
    """The first test that fails, or "" """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", *tests]
    # The copy is found before the installed package, by being where Python starts.
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_PROFILE": "mutation",
    }
    try:
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return f"(hangs: no end after {LIMIT:.0f} s)"
    if run.returncode == 0:
        return ""
    if run.returncode < 0:  # memory that is freed too early does not raise
        return f"(dies of signal {-run.returncode})"
    found = re.findall(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    if run.returncode != 1 or not found:
        raise SystemExit(
            f"the tests did not run (exit status {run.returncode}):\n{run.stdout[-2000:]}{run.stderr[-2000:]}"
        )
    return found[0]


def main(words: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if all(word in mutant.name for word in words)]
    print(f"{'mutant':<78} {'seconds':>7}  killed by", flush=True)
    verdicts = []
    with ThreadPoolExecutor(JOBS) as pool:
        for verdict in pool.map(judge, chosen):
            verdicts.append(verdict)
            print(f"{verdict.mutant.name:<78} {verdict.seconds:>7.0f}  {verdict.killer or 'SURVIVES'}", flush=True)
    alive = [verdict for verdict in verdicts if not verdict.killer]
    print(f"{len(chosen)} mutants, {len(chosen) - len(alive)} killed, {len(alive)} survive")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
