"""From plain data to sections: every kind of wrong key and value, with what the message says."""

import dataclasses
from typing import get_type_hints

import pytest

from functional_par.config import schema
from functional_par.config.rule import Place, strip_optional
from functional_par.config.sections import Sections
from functional_par.errors import ConfigError

MODEL = {"d_model": 8, "n_layers": 1, "n_heads": 2}
TOKENS = {"sequence_length": 4, "train_steps": 2, "global_batch_size": 2}
GOOD = {"model": MODEL, "tokens": TOKENS}


def build(data, **origins):
    return schema.build(Sections, data, Place("x.yaml", origins=origins))


def with_key(path, value):
    return schema.override(Sections, GOOD, {path: value})


def test_defaults_fill_what_is_left_out():
    sections = build(GOOD)
    assert sections.parallelism.dp == 1
    assert sections.optimizer.optimizer_factory.name == "adamW"
    assert dataclasses.is_dataclass(sections.tokens)


def test_an_empty_section_is_a_section_of_defaults():
    assert build({**GOOD, "parallelism": None, "optimizer": {"learning_rate_scheduler": None}}) == build(GOOD)


def test_sections_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        build(GOOD).parallelism.dp = 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"paralelism": {}}, r"^x\.yaml: paralelism is unknown: did you mean 'parallelism'\?$"),
        ({"parallelism": {"pp_engin": 2}}, r"^x\.yaml: parallelism\.pp_engin is unknown: did you mean 'pp_engine'\?"),
        ({"parallelism": {"contex_parallel_size": 2}}, "did you mean 'context_parallel_size'"),
        (
            {"optimizer": {"optimizer_factory": {"adam_beta3": 1}}},
            r"optimizer\.optimizer_factory\.adam_beta3 is unknown",
        ),
        ({"logging": {"qqqqqqqq": 1}}, r"logging\.qqqqqqqq is unknown: the keys here are iteration_step_info_interval"),
        ({"parallelism": {3: 2}}, r"parallelism\.3 is unknown"),
        ({"parallelism": 3}, r"x\.yaml: parallelism: got 3; expected a section with keys such as dp, pp, tp"),
        ({"parallelism": {"cp": 1, "context_parallel_size": 2}}, "context_parallel_size is 2, but the same key is 1"),
    ],
)
def test_a_wrong_key_is_named_with_the_nearest_right_one(data, message):
    with pytest.raises(ConfigError, match=message):
        build({**GOOD, **data})


@pytest.mark.parametrize("section", ["model", "tokens"])
def test_a_missing_section_is_named(section):
    with pytest.raises(ConfigError, match=f"{section} is missing: expected a section with keys such as"):
        build({name: data for name, data in GOOD.items() if name != section})


@pytest.mark.parametrize("path", ["model.d_model", "model.n_heads", "tokens.sequence_length", "tokens.train_steps"])
def test_a_missing_key_is_named(path):
    section, name = path.split(".")
    data = {**GOOD, section: {k: v for k, v in GOOD[section].items() if k != name}}
    with pytest.raises(
        ConfigError, match=rf"x\.yaml: {path} is missing: expected an integer of at least 1 and of at most \d+\."
    ):
        build(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("parallelism.dp", 0, "got 0; expected an integer of at least 1"),
        ("parallelism.tp", -2, "got -2; expected an integer of at least 1"),
        ("parallelism.pp", "2", r"got '2' \(a text\); expected an integer"),
        ("parallelism.pp", 2.0, "got 2.0; expected an integer"),
        ("parallelism.cp", True, "got true; expected an integer"),
        ("parallelism.ep", None, "got null; expected an integer of at least 1"),
        (
            "parallelism.pp_engine",
            "wave",
            r"got 'wave' \(a text\); expected one of afab, 1f1b, interleaved, .*\.csv file, or null",
        ),
        ("parallelism.pp_engine", 1, "got 1; expected one of afab, 1f1b"),
        ("parallelism.pp_chunks", 0, "got 0; expected an integer of at least 1"),
        ("logging.trace_step", 0, "got 0; expected an integer of at least 1"),
        ("parallelism.tp_mode", "SCATTER", "expected one of ALL_REDUCE, REDUCE_SCATTER"),
        ("parallelism.tp_linear_async_communication", "yes", "expected true or false, or null"),
        (
            "parallelism.stage_layers",
            [1, None],
            r"got \[1, None\] \(a list\); expected a list, each an integer of at least 1",
        ),
        (
            "parallelism.stage_layers",
            [0],
            "expected a list, each an integer of at least 1 and of at most 2048 or a text that is not empty, or null",
        ),
        ("parallelism.stage_layers", 3, "got 3; expected a list"),
        ("parallelism.stage_layers", ["embed", ""], "got .*; expected a list"),
        ("parallelism.stage_memory_gb", 0, "got 0; expected a number above 0, or null"),
        ("tokens.sequence_length", 0, "expected an integer of at least 1"),
        ("tokens.train_steps", -1, "expected an integer of at least 1"),
        ("tokens.micro_batch_size", 0, "expected an integer of at least 1 and of at most 2147483647, or null"),
        ("tokens.batch_accumulation_per_replica", 0, "expected an integer of at least 1"),
        ("tokens.global_batch_size", -8, "got -8; expected an integer of at least 1"),
        ("tokens.microbatches", 0, "expected an integer of at least 1"),
        ("tokens.limit_val_batches", -1, "expected an integer of at least 0"),
        ("parallelism.remat", "some", "got 'some'.*; expected one of none, full, selective, or null"),
        ("precision.master", "float16", "got 'float16'.*; expected one of float32, float64, bfloat16, or null"),
        ("optimizer.weight_decay", -0.1, "got -0.1; expected a number of at least 0"),
        ("optimizer.clip_grad", 0, "got 0; expected a number above 0, or null"),
        ("optimizer.clip_grad", float("inf"), "got inf; expected a number above 0"),
        ("optimizer.zero_stage", 4, "got 4; expected one of 0, 1, 2, 3"),
        ("optimizer.accumulate_grad_in_fp32", 1, "got 1; expected true or false"),
        ("optimizer.weight_decay_exclude_named_params", "bias", "expected a list, each a text"),
        ("optimizer.optimizer_factory.name", "adagrad", "expected one of adamW, sgd"),
        ("optimizer.optimizer_factory.adam_beta1", 1, "expected a number of at least 0 and below 1"),
        ("optimizer.optimizer_factory.adam_eps", 0.0, "expected a number above 0"),
        ("optimizer.optimizer_factory.momentum", -0.5, "expected a number of at least 0 and below 1"),
        ("optimizer.learning_rate_scheduler.learning_rate", "fast", "expected a number above 0"),
        ("optimizer.learning_rate_scheduler.learning_rate", float("nan"), "got nan; expected a number"),
        ("optimizer.learning_rate_scheduler.learning_rate", 10**400, "expected a number above 0"),
        ("optimizer.learning_rate_scheduler.lr_warmup_steps", -1, "expected an integer of at least 0"),
        ("optimizer.learning_rate_scheduler.lr_warmup_style", "cosine", "expected one of linear, constant"),
        ("optimizer.learning_rate_scheduler.lr_decay_style", "sqrt", "expected one of linear, cosine, 1-sqrt"),
        ("model.name", "bert", "expected one of gpt, llama"),
        ("model.vocab", 0, "expected an integer of at least 1"),
        ("model.n_kv_heads", 0, "expected an integer of at least 1"),
        ("model.tie", "no", "expected true or false"),
        ("model.dtype", "float16", "expected one of float32, float64, bfloat16"),
        ("model.norm_eps", 0, "expected a number above 0"),
        ("data.text", 3, "got 3; expected a text that is not empty, or null"),
        ("data.text", "", r"got '' \(a text\); expected a text that is not empty, or null"),
        ("data.tokens", " ", r"got ' ' \(a text\); expected a text that is not empty"),
        ("logging.metrics_file", "", "expected a text that is not empty"),
        ("optimizer.weight_decay_exclude_named_params", [""], "expected a list, each a text that is not empty"),
        ("general.seed", -1, "expected an integer of at least 0 and of at most"),
        ("general.seed", 2**63, "expected an integer of at least 0 and of at most"),
        ("logging.iteration_step_info_interval", 0, "expected an integer of at least 1"),
        ("logging.log_level", "loud", "expected one of debug, info"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(path, value, message):
    with pytest.raises(ConfigError, match=rf"^x\.yaml: {path}: .*{message}"):
        build(with_key(path, value))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("tokens.val_check_interval", 10, r"10 is not available yet: .*\. Set it to -1\."),
    ],
)
def test_what_is_valid_but_not_available_is_refused_early(path, value, message):
    with pytest.raises(ConfigError, match=rf"^x\.yaml: {path}: {message}"):
        build(with_key(path, value))


@pytest.mark.parametrize("mode", ["reduce_scatter", "Reduce-Scatter", "REDUCE_SCATTER"])
def test_choices_match_in_any_case(mode):
    assert build(with_key("parallelism.tp_mode", mode)).parallelism.tp_mode == "REDUCE_SCATTER"


def test_integers_are_numbers():
    rate = build(with_key("optimizer.learning_rate_scheduler.learning_rate", 1)).optimizer.learning_rate_scheduler
    assert rate.learning_rate == 1.0
    assert isinstance(rate.learning_rate, float)


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(ConfigError, match=r"got 'x{50,60}\.\.\. \(a text\)"):
        build(with_key("parallelism.dp", "x" * 1000))


def test_a_flag_is_named_as_the_flag():
    with pytest.raises(ConfigError, match=r"^--dp \(parallelism\.dp\): got 0; expected an integer"):
        build(with_key("parallelism.dp", 0), **{"parallelism.dp": "--dp"})


def test_an_override_replaces_every_name_of_a_key():
    data = {"parallelism": {"context_parallel_size": 4, "dp": 2}}
    assert schema.override(Sections, data, {"parallelism.cp": 2}) == {"parallelism": {"cp": 2, "dp": 2}}
    assert data == {"parallelism": {"context_parallel_size": 4, "dp": 2}}


def test_an_override_of_a_key_that_is_not_there_is_unknown():
    with pytest.raises(ConfigError, match="did you mean 'parallelism'"):
        build(with_key("paralelism.dp", 2))
    with pytest.raises(ConfigError, match=r"parallelism\.dq is unknown"):
        build(with_key("parallelism.dq", 2))


def test_an_override_inside_a_broken_section_leaves_the_section_to_be_reported():
    with pytest.raises(ConfigError, match="parallelism: got 3; expected a section"):
        build(schema.override(Sections, {**GOOD, "parallelism": 3}, {"parallelism.dp": 2}))


def integers(cls=Sections, path=""):
    for field in dataclasses.fields(cls):
        hint = strip_optional(get_type_hints(cls)[field.name])[0]
        if dataclasses.is_dataclass(hint):
            yield from integers(hint, f"{path}{field.name}.")
        elif hint in (int, tuple[int, ...]):
            yield f"{path}{field.name}", hint


@pytest.mark.parametrize(("path", "hint"), list(integers()))
@pytest.mark.parametrize("value", [2**63, 10**22])
def test_every_integer_has_an_upper_bound(path, hint, value):
    given, shown = (value, str(value)) if hint is int else ([value], rf"\[{value}\]")
    with pytest.raises(ConfigError, match=rf"^x\.yaml: {path}: (got )?{shown}.*(of at most \d+|one of|not available)"):
        build(with_key(path, given))
