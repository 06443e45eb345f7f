"""A suite over a right model passes; of a model with a bug the property that it breaks fails, and says what is wrong."""

import os
import subprocess
import sys
from contextlib import contextmanager, suppress

import pytest
import torch
from hypothesis import Phase, settings

import functional_par as fp
from functional_par.errors import ConfigError
from functional_par.testing.batch import make_batch
from functional_par.testing.chosen import chosen
from functional_par.testing.free import free_model
from functional_par.testing.strategies import models
from functional_par.testing.suites import default_examples, suite
from tests.raises import matched

NAMES = [
    "test_a_pipeline_alone_changes_no_bit",
    "test_each_axis_alone_equals_one_process",
    "test_every_layout_equals_one_process",
    "test_orders_of_transforms_give_equal_plans",
    "test_schedules_give_the_same_bits",
    "test_tensor_parallelism_is_possible",
    "test_the_cut_of_the_batch_does_not_matter",
    "test_the_step_is_pure",
    "test_training_goes_on_in_another_layout",
]


@contextmanager
def profile(name, **changes):
    """The profile in use, changed."""
    before = settings.get_current_profile_name()
    settings.register_profile(name, settings(), **changes)
    settings.load_profile(name)
    try:
        yield
    finally:
        settings.load_profile(before)


def suite_of(*args, **options):
    """A suite that shows the first case that fails, not the smallest."""
    with profile("first", phases=[Phase.generate], max_examples=20):
        return suite(*args, **options)()


def names_of(made):
    return sorted(name for name in dir(made) if name.startswith("test_"))


def mlp(p, x, par):
    hidden = (par.pvary(x, "tp") @ p["up"].T).tanh()
    return x + par.psum(hidden @ p["down"].T, "tp") + p["bias"]


def squares(p, x, par):
    kept = par.batch["labels"] != -100
    return (x.square() * kept[..., None]).sum(), kept.sum()


def embed(p, batch, par):
    return p[batch["tokens"]]


WIDE = fp.init.normal(0.5)


def model_of(layer=mlp, loss=squares, first=embed, init=WIDE, count=None):
    params = {
        "embed": fp.Param((5, 4), "byte embed", init),
        "mlp": {
            "up": fp.Param((6, 4), "ffn embed", fp.init.normal(0.5)),
            "down": fp.Param((4, 6), "embed ffn", fp.init.normal(0.5)),
            "bias": fp.Param((4,), "embed", fp.init.normal(0.5)),
        },
    }
    fields = {"tokens": fp.Input((None, 2), high=5), "labels": fp.Input((None, 2))}
    return fp.Model(params, [("embed", "embed", first), ("mlp", "mlp", layer)], loss, fields, count)


def test_a_suite_has_a_test_for_each_property():
    assert names_of(suite(model_of)) == NAMES
    assert names_of(suite(model_of(), axes=("dp",))) == [
        n for n in NAMES if not any(w in n for w in ("pipe", "sched", "tensor"))
    ]
    assert names_of(suite(models())) == [n for n in NAMES if "tensor" not in n and "axis" not in n]


@pytest.mark.parametrize("name", NAMES)
def test_of_a_right_model_every_test_passes(name):
    made = suite(model_of, fp.shard_tp(dims={"ffn": "error"}), max_examples=2)()
    getattr(made, name)()


def test_the_model_may_have_transforms_and_batches_of_its_own():
    seen = []

    def batch(rows, seed):
        seen.append((rows, seed))
        return make_batch(model, rows, seed=seed)

    model = free_model(["tanh"], numbers=True)
    freeze = fp.reparam("embed", leaves=lambda path, leaf: fp.Param(leaf.shape, leaf.dims, leaf.init, trainable=False))
    made = suite(model, freeze, batch=batch, max_examples=2)()
    made.test_the_step_is_pure()
    made.test_orders_of_transforms_give_equal_plans()
    assert seen


def bias_in_the_sum(p, x, par):
    return x + par.psum((par.pvary(x, "tp") @ p["up"].T).tanh() @ p["down"].T + p["bias"], "tp")


def mean_over_rows(p, x, par):
    return mlp(p, x - x.mean(0), par)


def own_mean(p, x, par):
    total, count = squares(p, x, par)
    return total / count.clamp(min=1) * par.batch["labels"].numel(), count


def in_float32(p, x, par):
    total, count = squares(p, x, par)
    return total.float().double(), count


def local_draw(draw):
    """Other values in each shape of shard, and at each call."""
    return torch.randn(draw.local_shape, dtype=draw.dtype, device=draw.device)


def per_rank(p, x, par):
    return mlp(p, x, par) * par.size("dp")


def writes_to_the_batch(p, batch, par):
    x = p[batch["tokens"].clone()]
    if x.device.type != "meta":
        with suppress(RuntimeError):  # torch.func refuses, the tape does not
            batch["tokens"].fill_(0)
    return x


def counts_up():
    calls = []

    def layer(p, x, par):
        calls.append(None)
        return mlp(p, x, par) * (1.0 + len(calls) / 8)

    return layer


EQUAL, CUT, PURE = (
    f"test_{name}"
    for name in ("every_layout_equals_one_process", "the_cut_of_the_batch_does_not_matter", "the_step_is_pure")
)
BUGS = {
    "a bias inside the sum": (
        {"layer": bias_in_the_sum},
        EQUAL,
        r"Layout\(Mesh\(.*tp=[234]\).*: not what model\(params, batch\) gives in one process:\n  loss: off by .*\n.*of embed",
    ),
    "rows that are mixed": (
        {"layer": mean_over_rows},
        CUT,
        r"rows in \d pieces .* are not one batch. A layer or the loss mixes rows",
    ),
    "a mean of its own": ({"loss": own_mean}, CUT, "divides by what it counts itself"),
    "a factor of its own": ({"layer": per_rank}, EQUAL, r"gradient of mlp.bias: off by"),
    "arithmetic in float32": ({"loss": in_float32}, EQUAL, "the rounding of float32"),
    "initial values by shard": ({"init": local_draw}, EQUAL, "not what model"),
    "hidden state": ({"layer": counts_up()}, PURE, r"rank 0: step 1, called twice, gives different bits"),
    "a field that is written to": ({"first": writes_to_the_batch}, PURE, "step 1 writes to the batch that it is given"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_of_a_wrong_model_a_test_fails_and_says_what_is_wrong(bug):
    planted, name, message = BUGS[bug]
    with pytest.raises(AssertionError, match=message) as caught:
        getattr(suite_of(model_of(**planted)), name)()
    assert "Case(" in "".join(caught.value.__notes__)


def test_two_ranks_along_each_axis_are_tried_however_few_layouts_are_drawn():
    made = suite_of(model_of(bias_in_the_sum), max_examples=1)
    with pytest.raises(AssertionError, match=r"Layout\(Mesh\(tp=2\)\)(.|\n)*gradient of mlp\.bias: off by"):
        made.test_each_axis_alone_equals_one_process()


def unsummed(p, x, par):
    return x + (par.pvary(x, "tp") @ p["up"].T).tanh() @ p["down"].T + p["bias"]


def test_a_missing_collective_is_the_error_that_composing_raises():
    with pytest.raises(fp.MissingCollective, match="layer 'mlp'"):
        getattr(suite_of(model_of(unsummed)), EQUAL)()


def test_terms_that_are_counted_otherwise_are_the_error_of_the_step():
    with pytest.raises(fp.ParallelError, match="terms"):
        getattr(suite_of(model_of(count=lambda batch: torch.tensor(len(batch["labels"])))), EQUAL)()


def test_a_model_that_no_tp_divides_is_told():
    model = fp.Model(
        {"w": fp.Param((5, 7), "ffn embed")},
        [("w", "w", lambda p, x, par: x["x"] @ p.T)],
        lambda p, x, par: (par.psum(x.sum(), "tp"), len(x)),
        {"x": fp.Input((None, 7), torch.float32)},
    )
    made = suite(model, axes=("tp",), max_ranks=3)()
    with pytest.raises(
        AssertionError, match=r"no tp of 2 to 3 has a plan.*axes=\('pp', 'dp'\)\).\n  tp=2, ALL_REDUCE: shard_tp: dim"
    ):
        made.test_tensor_parallelism_is_possible()


def test_a_model_made_for_one_mode_is_told_so_once():
    def one_way(p, x, par):
        """No sequence that could be split."""
        hidden = fp.nn.column_linear(x, p["up"], par).tanh()
        return x + fp.nn.row_linear(hidden, p["down"], par) + p["bias"]

    with pytest.raises(
        AssertionError, match=r"say so: suite\(..., modes=\('ALL_REDUCE',\)\).\n  REDUCE_SCATTER: layer 'mlp', "
    ):
        suite(model_of(one_way))().test_tensor_parallelism_is_possible()
    with pytest.raises(AssertionError, match=r"a collective is wrong.\n  ALL_REDUCE: .*\n  REDUCE_SCATTER: "):
        suite(model_of(unsummed))().test_tensor_parallelism_is_possible()
    suite(model_of(one_way), max_examples=5)().test_orders_of_transforms_give_equal_plans()
    suite(model_of(one_way), modes=("ALL_REDUCE",))().test_tensor_parallelism_is_possible()


def test_something_else_than_a_model_is_told():
    with pytest.raises(
        fp.ModelError, match=r"suite\(.*takes an fp.Model, .*this gives int. Transforms are further arguments"
    ):
        suite(lambda: 3)


def test_the_number_of_examples_is_the_profiles_and_20_where_it_says_nothing():
    with profile("nothing", max_examples=settings.get_profile("default").max_examples):
        assert default_examples() == 20
    with profile("something", max_examples=7):
        assert default_examples() == 7
        assert suite(model_of).test_the_step_is_pure._hypothesis_internal_use_settings.max_examples == 7
    assert suite(model_of, max_examples=3).test_the_step_is_pure._hypothesis_internal_use_settings.max_examples == 3


def test_no_time_goes_into_explaining_a_case():
    assert Phase.explain not in suite(model_of).test_the_step_is_pure._hypothesis_internal_use_settings.phases


def test_the_chosen_model_is_found_by_name():
    assert names_of(chosen("tests.testing.test_suites:model_of")) == NAMES
    assert names_of(chosen("")) == names_of(suite(models()))
    assert chosen("tests.testing.test_suites:OTHER") is OTHER


OTHER = suite(model_of, axes=("dp",))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model", "model 'model': give it as package.module:name"),
        ("functional_par.nowhere:model", "model 'functional_par.nowhere:model': No module named"),
        ("functional_par:modle", "has no attribute 'modle'"),
    ],
    ids=["no colon", "no module", "no attribute"],
)
def test_a_model_that_is_not_there_is_told(name, message):
    with pytest.raises(ConfigError, match=message):
        chosen(name)


def test_without_hypothesis_all_works_but_suite_and_strategies():
    code = """
import sys
sys.modules["hypothesis"] = None
import functional_par as fp
model = fp.Model({"w": fp.Param((3,), "in")}, [("w", "w", lambda p, b, par: b["x"] @ p)], lambda p, x, par: (x.sum(), len(x)),
    {"x": fp.Input((None, 3), fp.testing.batch.torch.float64)})
fp.testing.assert_equivalent(fp.compose(fp.dp_reduce())(model), fp.Mesh(dp=2))
for name in ("suite", "strategies"):
    try:
        getattr(fp.testing, name)
    except ModuleNotFoundError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 2
    for name in ("suite", "strategies"):
        matched(
            done.stdout, f"functional_par.testing.{name} needs hypothesis: pip install 'functional_par[testing]'.\n"
        )


def test_a_name_that_is_not_there_is_told_as_python_tells_it():
    with pytest.raises(AttributeError, match=r"module 'functional_par\.testing' has no attribute 'suit'"):
        fp.testing.suit()


def test_pytest_runs_the_suite_on_a_users_model_from_any_folder(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from functional_par.testing.free import free_model\n\n\ndef make():\n    return free_model(['tanh'])\n"
    )
    options = [
        "-p",
        "functional_par.testing.plugin",
        "--pyargs",
        "functional_par.testing",
        "--model",
        "mine:make",
        "-v",
    ]
    options += ["--hypothesis-profile", "ci", "-p", "no:cacheprovider", "-k", "tensor"]
    quiet = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "FUNCTIONAL_PAR"))}
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=tmp_path, env=quiet, capture_output=True, text=True, check=False)
    assert "1 passed, 8 deselected" in done.stdout, done.stdout + done.stderr
    assert "hypothesis profile 'ci'" in done.stdout
    assert "TestSuite::test_tensor_parallelism_is_possible PASSED" in done.stdout
