"""The main job as its users run it: every spec trains, bad input is told and ends with 2, and nothing hangs."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import functional_par as fp
import functional_par.__main__
from functional_par.report import exit_code

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "3d_step.py"
SPECS = sorted((ROOT / "specs").glob("*.yaml"))
ONE = str(ROOT / "specs" / "one.yaml")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def example():
    found = importlib.util.spec_from_file_location("example_3d_step", SCRIPT)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text("".join(f"{i} is one less than {i + 1}.\n" for i in range(500)))
    return str(path)


def shell(*argv, **environ):
    """Run a module or script in a process of its own; returns (exit code, stdout, stderr)."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=120, cwd=ROOT, env=env)
    return done.returncode, done.stdout, done.stderr


def test_the_specs_of_the_issue_are_there():
    names = {path.stem for path in SPECS}
    assert names >= {"tiny", "one", "dp2", "tp2", "pp2", "tie_rs", "llama_gqa"}


@pytest.mark.parametrize("spec", SPECS, ids=lambda path: path.stem)
def test_a_spec_trains(example, spec, capsys):
    history = example.main(["--config-file", str(spec), "--steps", "2"])
    assert [record["step"] for record in history] == [1, 2]
    assert all(0 < record["loss"] < 7 and record["grad_norm"] > 0 for record in history)
    out = capsys.readouterr().out
    assert out.count("step 2/2") == 1
    assert "unigram entropy" in out


def test_a_layout_changes_nothing(example, book):
    given = ["--text", book, "--steps", "3", "--dtype", "float64", "--config-file"]
    reference = example.main([*given, ONE])
    history = example.main([*given, ONE, "--dp", "2", "--pp", "2", "--tp", "2", "--microbatches", "2", "--tp-async"])
    for one, many in zip(reference, history, strict=True):
        assert many["loss"] == pytest.approx(one["loss"], rel=1e-10)
        assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-10)
        assert (many["tokens"], many["lr"]) == (one["tokens"], one["lr"])


def test_the_metrics_file_has_one_object_a_step(example, book, tmp_path):
    path = tmp_path / "m.jsonl"
    history = example.main(
        ["--config-file", ONE, "--dp", "2", "--text", book, "--steps", "3", "--metrics-file", str(path)]
    )
    assert [json.loads(line) for line in path.read_text().splitlines()] == history


def test_a_run_draws_the_step_that_it_traced(example, book, tmp_path, capsys):
    path, layout = str(tmp_path / "t.json"), ["--pp", "2", "--microbatches", "2", "--pp-engine", "ZBVZeroBubble"]
    example.main(["--config-file", ONE, "--text", book, "--steps", "2", "--trace-file", path, *layout])
    capsys.readouterr()
    functional_par.__main__.main(["schedule", "--trace", path])
    out = capsys.readouterr().out
    assert out.startswith("zbv, measured: 2 ranks, 4 stages, 2 microbatches\n\n")
    assert "rank 0: pp 0  " in out
    assert "with the mean times of each stage" in out


def test_print_groups_shows_the_mesh_and_stops(example, capsys, tmp_path):
    path = tmp_path / "m.jsonl"
    assert example.main(["--config-file", ONE, "--cp", "2", "--print-groups", "--metrics-file", str(path)]) == []
    assert capsys.readouterr().out == fp.Mesh(cp=2).table() + "\n"
    assert not path.exists()


def test_print_groups_needs_a_mesh_and_no_batch(example, capsys):
    assert example.main(["--config-file", ONE, "--dp", "3", "--print-groups"]) == []
    assert capsys.readouterr().out == fp.Mesh(dp=3).table() + "\n"


@pytest.mark.parametrize("layout", [[], ["--dp", "2", "--pp", "2"]])
def test_a_full_disk_ends_all_ranks_with_one_error(example, book, layout):
    with pytest.raises(fp.ConfigError, match="/dev/full cannot be written: No space left on device"):
        example.main(["--config-file", ONE, "--text", book, "--metrics-file", "/dev/full", *layout])


def test_a_batch_beyond_memory_is_a_message_and_exit_code_two(example, book, capsys):
    argv = ["--config-file", ONE, "--text", book, "--global-batch-size", str(2**31 - 1)]
    assert exit_code(lambda: example.main(argv)) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: out of memory: ")
    assert err.count("\n") == 1


def test_explain_shows_every_leaf_before_training(example, book, capsys):
    example.main(["--config-file", ONE, "--dp", "2", "--text", book, "--steps", "1", "--explain"])
    assert "attn.out.weight" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "error", "message"),
    [
        (["--tp", "3"], fp.CompositionError, "tp=3"),
        (["--cp", "2"], fp.ConfigError, "context parallelism is not available yet"),
        (["--dp", "3"], fp.ConfigError, "does not divide"),
        (["--pp", "9"], fp.CompositionError, "9 pipeline stages"),
        (["--text", "nowhere.txt"], fp.DataError, "does not exist"),
        (["--sequence-length", "20000000"], fp.DataError, "too few for seq_len"),
        (["--sequence-length", "2000000000"], fp.ConfigError, "numbers in the attention weights"),
        (["--sequence-length", "9" * 23], fp.ConfigError, "--sequence-length .* at most 2147483647"),
        (["--dp", "257", "--global-batch-size", "257"], fp.MeshError, "257 ranks, and without torchrun"),
        (["--text", ""], fp.ConfigError, "--text .*a text that is not empty"),
        (["--metrics-file", "nowhere/m.jsonl"], fp.ConfigError, "does not exist; make it first"),
    ],
)
def test_bad_input_is_told_before_anything_runs(example, argv, error, message, capsys):
    with pytest.raises(error, match=message):
        example.main(["--config-file", ONE, *argv])
    assert capsys.readouterr().out == ""


def test_a_loss_that_is_no_number_ends_the_run(example, book, tmp_path):
    path = tmp_path / "m.jsonl"
    with pytest.raises(fp.NonFiniteError, match="Lower the learning rate"):
        example.main(["--config-file", ONE, "--dp", "2", "--text", book, "--lr", "1e30", "--metrics-file", str(path)])
    assert all(json.loads(line)["loss"] is not None for line in path.read_text().splitlines())


def test_a_failing_rank_ends_all_with_its_own_error(example, book, monkeypatch):
    real = fp.data.Batch.rows

    def fails(batch, start, stop):
        if batch.step == 1 and start > 0:
            raise OSError("the disk is gone")
        return real(batch, start, stop)

    monkeypatch.setattr(fp.data.Batch, "rows", fails)
    start = time.monotonic()
    with pytest.raises(OSError, match="the disk is gone"):
        example.main(["--config-file", ONE, "--dp", "2", "--text", book])
    assert time.monotonic() - start < 30


def test_a_misspelt_key_is_a_message_and_exit_code_two(tmp_path):
    (tmp_path / "x.yaml").write_text(Path(ONE).read_text().replace("parallelism:", "paralelism:"))
    code, out, err = shell(str(SCRIPT), "--config-file", str(tmp_path / "x.yaml"))
    assert (code, out) == (2, "")
    assert err == f"error: {tmp_path / 'x.yaml'}: paralelism is unknown: did you mean 'parallelism'?\n"


def test_a_wrong_number_of_processes_is_told_before_anything_runs(example, monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(fp.MeshError, match="= 1 ranks, but 2 are running"):
        example.main(["--config-file", ONE])
    assert capsys.readouterr().out == ""


def test_a_plan_needs_no_launcher(capsys):
    code, out, err = shell("-m", "functional_par", "plan", "--config-file", "specs/tiny.yaml")
    assert (code, err) == (0, "")
    assert "stage 1" in out
    functional_par.__main__.main(["explain", "--config-file", str(ROOT / "specs" / "tiny.yaml")])
    assert "mlp.down.weight" in capsys.readouterr().out


def test_an_interrupt_ends_all_ranks_with_130(book):
    argv = [
        sys.executable,
        str(SCRIPT),
        "--config-file",
        ONE,
        "--tp",
        "2",
        "--dp",
        "2",
        "--text",
        book,
        "--steps",
        "100000",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env) as run:
        assert any(line.startswith("step") for line in run.stdout)
        run.send_signal(signal.SIGINT)
        start = time.monotonic()
        _, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert time.monotonic() - start < 20
    assert "Traceback" not in err
