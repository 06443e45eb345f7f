"""The benchmark: a short race, in which all reach one loss, and one who cannot race is told apart."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "examples" / "benchmark.py"
FIELDS = {"model", "layout", "who", "ms", "spread", "best", "cpu_ms", "rss_mb", "bytes", "loss"}


def race(tmp_path, *options):
    command = [sys.executable, str(BENCHMARK), "--model", "tiny", "--rounds", "1", "--steps", "1", *options]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "rows.json")], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return json.loads((tmp_path / "rows.json").read_text()), done.stdout


def test_all_reach_one_loss_and_send_what_the_layout_needs(tmp_path):
    rows, shown = race(tmp_path, "--layouts", "one,tp2", "--who", "limit,ours,ours threads,ours threads rs")
    found = {(row["layout"], row["who"]): row for row in rows}
    assert list(found) == [("one", "limit"), ("one", "ours"), ("tp2", "ours threads"), ("tp2", "ours threads rs")]
    for row in rows:
        assert row.keys() >= FIELDS
        assert abs(row["loss"] - rows[0]["loss"]) < 1e-3 * rows[0]["loss"]
        assert 0 < row["best"] <= row["ms"]
        assert row["rss_mb"] > 50
    assert found["one", "ours"]["bytes"] == 0
    # All-reduces and their halves move the same activations; two ranks send as many bytes as a stream has, each time.
    assert found["tp2", "ours threads"]["bytes"] > 4 * 8 * (8 * 64 * 64 * 4)
    assert "equal to 0.001" in shown
