"""The README's Python blocks run, and print what the README says."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCK = r"((?:(?!```).)*)```"
PAIRS = re.findall(rf"```python\n{BLOCK}\n\n```text\n{BLOCK}", README, re.DOTALL)


def runs(index: int, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> str:
    source = tmp_path / "example.py"
    source.write_text(PAIRS[index][0])
    exec(compile(source.read_text(), str(source), "exec"), {"__name__": "example"})
    return capsys.readouterr().out


def test_the_readme_has_python_with_output() -> None:
    assert len(PAIRS) == 7


@pytest.mark.parametrize("index", range(len(PAIRS)))
def test_a_block_prints_what_the_readme_shows(index: int, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def lasting(text: str) -> list[str]:
        """The words, without the folder of the example and the line numbers of the library."""
        return re.sub(r"\.py:\d+", ".py", re.sub(r"\S*/example\.py", "example.py", text)).split()

    assert lasting(runs(index, capsys, tmp_path)) == lasting(PAIRS[index][1])
