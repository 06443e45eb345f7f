"""Flags: each takes the place of its key in the file, and is named when its value is wrong."""

from pathlib import Path

import pytest
import torch

from functional_par.config import flags
from functional_par.errors import ConfigError

TEXT = """
parallelism: {dp: 2, tp: 2, pp: 2, cp: 1}
tokens: {sequence_length: 8, train_steps: 20, micro_batch_size: 3, batch_accumulation_per_replica: 4}
model: {d_model: 16, n_layers: 2, n_heads: 4, tie: true}
data: {tokens: ids.bin, token_dtype: uint16}
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "x.yaml").write_text(TEXT)
    return str(tmp_path / "x.yaml")


def parse(path, *argv):
    return flags.parse(["--config-file", path, *argv])


def value(config, key):
    node = config.sections
    for name in key.split("."):
        node = getattr(node, name)
    return node


CASES = {
    "--dp": ("4", 4),
    "--tp": ("1", 1),
    "--pp": ("4", 4),
    "--cp": ("2", 2),
    "--ep": ("2", 2),
    "--tp-mode": ("reduce-scatter", "REDUCE_SCATTER"),
    "--tp-async": (None, True),
    "--pp-engine": ("AFAB", "afab"),
    "--pp-chunks": ("1", 1),
    "--steps": ("7", 7),
    "--sequence-length": ("32", 32),
    "--global-batch-size": ("48", 48),
    "--microbatches": ("3", 3),
    "--micro-batch-size": ("5", 5),
    "--lr": ("1e-2", 1e-2),
    "--zero": ("2", 2),
    "--clip": ("0.5", 0.5),
    "--engine": ("tape", "tape"),
    "--dtype": ("float64", "float64"),
    "--remat": ("Selective", "selective"),
    "--tie": (None, True),
    "--seed": ("11", 11),
    "--text": ("book.txt", "book.txt"),
    "--tokens": ("ids.npy", "ids.npy"),
    "--token-dtype": ("uint32", "uint32"),
    "--metrics-file": ("m.jsonl", "m.jsonl"),
    "--log-interval": ("10", 10),
    "--trace-file": ("t.json", "t.json"),
}


def test_every_flag_has_a_case():
    assert set(CASES) == {flag.name for flag in flags.FLAGS}


@pytest.mark.parametrize("flag", flags.FLAGS, ids=lambda flag: flag.name)
def test_a_flag_takes_the_place_of_its_key(path, flag):
    text, expected = CASES[flag.name]
    config = parse(path, flag.name, *([] if text is None else [text])).config
    assert value(config, flag.key) == expected


@pytest.mark.parametrize("flag", [flag for flag in flags.FLAGS if flag.kind is bool], ids=lambda flag: flag.name)
def test_a_switch_can_be_turned_off(path, flag):
    assert value(parse(path, flag.name.replace("--", "--no-", 1)).config, flag.key) is False


def test_without_flags_the_file_stands(path):
    options = parse(path)
    assert options.config.mesh().size == 8
    assert (options.backend, options.print_groups, options.explain) == (None, False, False)
    assert options.config.source == path


def test_a_global_batch_size_replaces_the_micro_batch_size(path):
    batch = parse(path, "--global-batch-size", "16", "--dp", "1").config.batch
    assert (batch.size, batch.microbatches, batch.micro_size) == (16, 4, 4)


def test_microbatches_replace_the_accumulation(path):
    batch = parse(path, "--microbatches", "2").config.batch
    assert (batch.size, batch.microbatches, batch.micro_size) == (12, 2, 3)


def test_a_global_batch_size_and_microbatches_hold_on_every_layout(path):
    given = ("--global-batch-size", "24", "--microbatches", "3")
    sizes = [parse(path, *given, "--dp", str(dp)).config.batch for dp in (1, 2, 4, 8)]
    assert [(b.size, b.microbatches, b.micro_size) for b in sizes] == [(24, 3, 8), (24, 3, 4), (24, 3, 2), (24, 3, 1)]


def test_a_text_replaces_the_token_file_and_the_other_way_round(path):
    data = parse(path, "--text", "book.txt").config.sections.data
    assert (data.text, data.tokens, data.token_dtype) == ("book.txt", None, None)
    data = parse(path, "--tokens", "other.bin", "--token-dtype", "uint32").config.sections.data
    assert (data.text, data.tokens, data.token_dtype) == (None, "other.bin", "uint32")


def test_choices_beside_the_configuration(path):
    options = parse(path, "--print-groups", "--explain", "--backend", "threads")
    assert (options.print_groups, options.explain, options.backend) == (True, True, "threads")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--dp", "0"], r"^--dp \(parallelism\.dp\): got 0; expected an integer of at least 1"),
        (["--dp", "two"], "argument --dp: invalid integer value: 'two'. See --help"),
        (["--dp", "1_0"], "argument --dp: invalid integer value: '1_0'"),
        (["--dp", "020"], "argument --dp: invalid integer value: '020'"),
        (["--lr", "1_0.5"], "argument --lr: invalid number value: '1_0.5'"),
        (["--lr", "nan"], "argument --lr: invalid number value: 'nan'"),
        (["--lr", "9" * 400], r"^--lr .*got inf; expected a number above 0"),
        (["--sequence-length", "9" * 22], r"^--sequence-length \(tokens\.sequence_length\): got 9{22}; .*at most 2147"),
        (["--global-batch-size", "9" * 16], r"^--global-batch-size .*got 9{16}; expected .* at most 2147483647"),
        (["--text", ""], r"^--text \(data\.text\): got '' \(a text\); expected a text that is not empty"),
        (["--tokens", ""], r"^--tokens \(data\.tokens\): got ''"),
        (["--metrics-file", ""], r"^--metrics-file \(logging\.metrics_file\): got ''"),
        (["--tp-mode", "scatter"], r"^--tp-mode \(parallelism\.tp_mode\): got 'scatter'"),
        (["--pp-engine", "wave"], r"^--pp-engine \(parallelism\.pp_engine\): got 'wave'"),
        (["--pp-chunks", "0"], r"^--pp-chunks \(parallelism\.pp_chunks\): got 0"),
        (["--pp-chunks", "2"], r"parallelism\.pp_chunks: schedule 1f1b: chunks=2, but it has 1 stage on each rank"),
        (["--trace-file", ""], r"^--trace-file \(logging\.trace_file\): got ''"),
        (["--trace-file", "t.json", "--steps", "1"], r"logging\.trace_step=2, but tokens\.train_steps=1\. Take an ear"),
        (["--dtype", "float16"], r"^--dtype \(model\.dtype\): got 'float16'"),
        (["--steps", "-1"], r"^--steps \(tokens\.train_steps\): got -1"),
        (["--lr", ".nan"], r"^--lr .*got nan; expected a number above 0"),
        (["--seed", "-5"], r"^--seed \(general\.seed\): got -5"),
        (["--backend", "mpi"], "argument --backend: invalid choice: 'mpi'"),
        (["--dq", "2"], "unrecognized arguments: --dq 2"),
        (["--step", "2"], "unrecognized arguments: --step 2"),
        (["--global-batch-size", "10"], "does not divide into 2 data-parallel replicas"),
        (["--text", "a", "--tokens", "b"], "data.text and data.tokens are both given"),
        (["--text", "a", "--token-dtype", "uint16"], "data.token_dtype is given without data.tokens"),
        (["--backend", "gloo"], "--backend gloo: its ranks are processes. Start it with torchrun"),
    ],
)
def test_a_bad_flag_is_named(path, argv, message, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match=message):
        parse(path, *argv)


def test_a_configuration_is_required():
    with pytest.raises(ConfigError, match="the following arguments are required: --config-file"):
        flags.parse([])


@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_configuration_path_is_named(empty):
    with pytest.raises(ConfigError, match=f"^--config-file '{empty}': a path is needed"):
        flags.parse(["--config-file", empty])


@pytest.mark.parametrize("argv", [["--dp", "3"], ["--microbatches", "5"], ["--lr", "1e-9", "--steps", "1"]])
def test_groups_need_a_mesh_and_nothing_else(path, argv):
    argv = ["--global-batch-size", "8", *argv]
    options = parse(path, "--print-groups", *argv)
    assert options.print_groups
    assert options.config.mesh().tp == 2


def test_groups_of_an_impossible_mesh_are_refused(path):
    with pytest.raises(ConfigError, match="got 0; expected an integer of at least 1"):
        parse(path, "--print-groups", "--dp", "0")
    with pytest.raises(
        ConfigError, match=r"pp=2 \* parallelism\.dp=99999 \* parallelism\.tp=2 = 399996 ranks; at most 100000"
    ):
        parse(path, "--print-groups", "--dp", "99999")


def test_a_table_of_groups_that_nobody_reads_is_refused(path):
    with pytest.raises(ConfigError, match=r"^--print-groups: .*dp=2000.* has 8000 ranks, a line each; at most 4096"):
        parse(path, "--print-groups", "--dp", "2000")


def test_help_says_what_paths_are_relative_to(capsys):
    with pytest.raises(SystemExit):
        flags.parse(["--help"])
    assert " ".join(capsys.readouterr().out.split()).count("relative to the current directory") == 5


def test_threads_under_torchrun_are_refused(path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match="torchrun started 8 processes, and each would run all ranks"):
        parse(path, "--backend", "threads")


def test_nccl_needs_a_device(path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="there is no CUDA device here"):
        parse(path, "--backend", "nccl")


def test_nanotrons_files_take_the_same_flags():
    fixture = str(Path(__file__).parent / "fixtures" / "nanotron_qwen.yaml")
    config = parse(fixture, "--cp", "2", "--ep", "2", "--global-batch-size", "8", "--microbatches", "1").config
    assert (config.mesh().sizes, config.batch.size) == ({"ep": 2, "pp": 1, "dp": 2, "cp": 2, "tp": 2}, 8)
