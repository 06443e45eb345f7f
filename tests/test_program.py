"""compose: orders, equality, what is checked when, and models that are refused with the line."""

from __future__ import annotations

import re
from itertools import permutations

import pytest
import torch

import functional_par as fp
from functional_par import (
    CompositionError,
    Mesh,
    MeshError,
    MissingCollective,
    ModelError,
    Program,
    SuperfluousCollective,
)
from functional_par.errors import TraceError

from . import refused
from .oracle import close, token_batch
from .raises import matched
from .toys import odd, small_gpt, small_llama

FOUR = {
    "tie": lambda: fp.tie("head.weight", "embed.weight"),
    "tp": lambda: fp.shard_tp("REDUCE_SCATTER", async_comm=True),
    "pp": lambda: fp.stage_pp("1f1b", microbatches=3),
    "dp": lambda: fp.dp_reduce(),
}

MESHES = [Mesh(), Mesh(ep=2, dp=2, pp=3, tp=2)]


def all_orders(model, tie):
    """Plans and explanations of every order of the four equal those of the first."""
    four = FOUR | {"tie": lambda: tie}
    first, orders = fp.compose(*(make() for make in four.values()))(model), list(permutations(four))
    assert len(orders) == 24
    for order in orders:
        program = fp.compose(*(four[name]() for name in order))(model)
        for mesh in MESHES:
            assert program.plan(mesh) == first.plan(mesh), order
            assert str(program.explain(mesh)) == str(first.explain(mesh)), order


def test_all_24_orders_give_equal_plans_and_the_same_explanation():
    all_orders(refused.model(refused.right), fp.tie("out", "table"))


@pytest.mark.deep
@pytest.mark.parametrize("model", [small_gpt(), small_llama()], ids=["gpt", "llama"])
def test_all_24_orders_of_the_transforms_of_a_language_model_give_equal_plans(model):
    all_orders(model, fp.tie("head.weight", "embed.weight"))


def test_different_transforms_give_different_plans():
    model = refused.model(refused.right)
    four = [make() for make in (FOUR | {"tie": lambda: fp.tie("out", "table")}).values()]

    def plan(*transforms):
        return fp.compose(*transforms)(model).plan(Mesh())

    for i in range(4):
        assert plan(*four[:i], *four[i + 1 :]) != plan(*four)
    assert plan(fp.shard_tp()) != plan(fp.shard_tp("REDUCE_SCATTER"))
    assert plan(fp.stage_pp("afab")) != plan(fp.stage_pp("1f1b"))
    assert plan(fp.stage_pp(microbatches=2)) != plan(fp.stage_pp(microbatches=3))


def test_a_program_is_a_value_with_its_transforms_in_the_order_given():
    model = small_gpt()
    assert fp.compose(fp.dp_reduce())(model) == fp.compose(fp.dp_reduce())(model)
    program = fp.compose(fp.dp_reduce(), fp.shard_tp())(model)
    assert program.transforms == (fp.dp_reduce(), fp.shard_tp())
    assert isinstance(program, Program)


def test_a_plan_is_made_once_a_mesh():
    program = fp.compose(fp.dp_reduce())(small_gpt())
    assert program.plan(Mesh(dp=2)) is program.plan(Mesh(dp=2))


def test_the_model_of_a_program_is_the_reference_with_its_ties():
    model = small_gpt()
    program = fp.compose(*(make() for make in FOUR.values()))(model)
    params = program.model.init(0, torch.float64)
    assert "head" not in params
    whole = params | {"head": params["embed"]}
    batch = token_batch(13, 4, 4)
    close(program.model(params, batch), model(whole, batch))


def test_no_transforms_are_the_plain_function():
    plan = fp.compose()(odd()).plan(Mesh())
    assert all(spec.owes == () and spec.owners == (0,) and spec.sharded == () for spec in plan.specs.values())
    assert plan.model == plan.source


@pytest.mark.parametrize("thing", [fp.dp_reduce, "tie", None, 3])
def test_what_is_no_transform_is_refused(thing):
    message = (
        f"compose({thing!r}): not a transform. Call it first (fp.dp_reduce(), not fp.dp_reduce), and pass the model to"
    )
    with pytest.raises(CompositionError, match=re.escape(message)):
        fp.compose(fp.shard_tp(), thing)


def test_a_model_among_the_transforms_is_refused_with_the_fix():
    with pytest.raises(CompositionError, match=re.escape("fp.compose(...)(model)")):
        fp.compose(odd(), fp.dp_reduce())


@pytest.mark.parametrize(
    ("twice", "name"), [(fp.dp_reduce(), "dp_reduce"), (fp.shard_tp(), "shard_tp"), (fp.stage_pp(), "stage_pp")]
)
def test_the_same_transform_twice_is_refused(twice, name):
    with pytest.raises(CompositionError, match=rf"compose: {name} is given 2 times; once is enough\."):
        fp.compose(twice, fp.tie("a", "b"), twice)


def test_what_is_no_model_is_refused():
    with pytest.raises(CompositionError, match=re.escape("compose(...)(dict): expected an fp.Model.")):
        fp.compose(fp.dp_reduce())({})


AXES = {"dp": "dp", "ep": "dp", "tp": "tp", "pp": "pp"}


@pytest.mark.parametrize("axis", AXES)
def test_leaving_out_a_transform_on_a_mesh_that_needs_it_is_refused_with_the_fix(axis):
    call = {"dp": "fp.dp_reduce()", "tp": "fp.shard_tp()", "pp": "fp.stage_pp()"}[AXES[axis]]
    program = fp.compose(*(make() for name, make in FOUR.items() if name != AXES[axis]))(small_gpt())
    message = (
        f"Mesh({axis}=2): axis {axis} has size 2, but no transform of this program uses it; its ranks would all compute the "
        f"same. Add {call}, or set {axis}=1."
    )
    with pytest.raises(MeshError, match=re.escape(message)):
        program.plan(Mesh(**{axis: 2}))
    others = [other for other in AXES if AXES[other] != AXES[axis]]
    assert program.plan(Mesh(**dict.fromkeys(others, 2))).mesh.size == 2 ** len(others)


def test_a_mesh_with_cp_is_refused():
    program = fp.compose(*(make() for make in FOUR.values()))(small_gpt())
    message = "Mesh(cp=2): axis cp has size 2, but no transform of this program uses it"
    with pytest.raises(MeshError, match=re.escape(message) + r".*Splitting the sequence.* set cp=1\."):
        program.plan(Mesh(cp=2))


def test_a_sequence_that_tp_does_not_divide_is_refused_by_plan_in_reduce_scatter():
    program = fp.compose(fp.shard_tp("REDUCE_SCATTER"))(small_gpt(seq=6))
    with pytest.raises(ModelError, match=r"a sequence of 6 positions cannot be split over tp=4"):
        program.plan(Mesh(tp=4))
    assert fp.compose(fp.shard_tp("ALL_REDUCE"))(small_gpt(seq=6)).plan(Mesh(tp=4))


def test_the_right_model_is_composed():
    plan = refused.program(refused.right).plan(Mesh(dp=2, tp=2, pp=2))
    assert {path: [d.axis for d in spec.owes] for path, spec in plan.specs.items()} == {
        "table": ["ep", "dp"],
        "mlp.up": ["ep", "pp", "dp"],
        "mlp.down": ["ep", "pp", "dp"],
        "out": ["ep", "dp"],
    }


REFUSED = [
    (refused.missing_psum, MissingCollective, "they lack par.psum(..., 'tp')"),
    (refused.missing_pvary, MissingCollective, "write par.pvary(..., 'tp') around the value that is the same"),
    (
        refused.superfluous_psum,
        SuperfluousCollective,
        "par.psum over tp of a value that is already the same on every rank",
    ),
    (refused.superfluous_psum, SuperfluousCollective, "Leave tp out"),
    (refused.superfluous_pvary, SuperfluousCollective, "par.pvary over tp of a value that already differs along tp"),
    (refused.superfluous_pvary, SuperfluousCollective, "Leave tp out."),
    (refused.slice_of_what_differs, SuperfluousCollective, "Use par.reduce_scatter for partial sums"),
    (
        refused.gather_of_what_is_the_same,
        SuperfluousCollective,
        "par.all_gather over tp of a value that is already the same",
    ),
    (refused.in_place, ModelError, "mul_ modifies in place an input of the layer"),
    (refused.in_place, ModelError, "Layers are pure functions: write to a clone."),
    (refused.in_place_through_a_view, ModelError, "add_ modifies in place an input of the layer"),
    (refused.writes_to_a_parameter, ModelError, "zero_ modifies in place an input of the layer"),
    (refused.draws, ModelError, "draws from torch's global generator"),
    (refused.draws, ModelError, "Draw with functional_par.random, whose numbers follow from a key and an index."),
    (refused.drops_out, ModelError, "draws from torch's global generator"),
    (
        refused.reads_a_number,
        ModelError,
        "must not turn a tensor into a Python number or branch on one; use torch.where",
    ),
    (refused.branches_on_a_tensor, ModelError, "must not turn a tensor into a Python number or branch on one"),
    (refused.closes_over_a_weight, ModelError, "closes over a tensor of shape [4] that requires a gradient"),
    (refused.closes_over_a_weight, ModelError, "make it a leaf of params and name it in the layer's paths"),
]


@pytest.mark.parametrize(
    ("fn", "error", "fix"), REFUSED, ids=[f"{fn.__name__}-{i}" for i, (fn, _, _) in enumerate(REFUSED)]
)
def test_a_wrong_layer_is_refused_at_compose_with_its_name_its_line_and_the_fix(fn, error, fix):
    with pytest.raises(error) as caught:
        refused.program(fn)
    line, code = refused.line_of(fn)
    for part in ("layer 'mlp'", line, code, fix):
        matched(caught.value, part)
    assert issubclass(error, TraceError if error is not ModelError else ValueError)


def test_a_slice_that_does_not_divide_is_refused_by_plan_with_the_line():
    program = refused.program(refused.slice_that_does_not_divide)
    line, code = refused.line_of(refused.slice_that_does_not_divide)
    with pytest.raises(ModelError) as caught:
        program.plan(Mesh(tp=4))
    for part in (
        "layer 'mlp'",
        line,
        code,
        "par.slice cuts dim 1 of [1, 9, 4] in tp=4 chunks, but 9 is not a multiple of 4",
    ):
        matched(caught.value, part)


def test_an_unknown_axis_in_a_layer_is_refused():
    message = "collective over 'model': layers communicate along ep, dp, cp, tp."
    with pytest.raises(MeshError, match=re.escape(message)):
        refused.program(refused.asks_for_a_wrong_axis)


def test_a_loss_that_differs_along_tp_is_refused():
    def unsummed(p, x, par):
        return torch.tanh(par.pvary(x, "tp") @ p["up"].T) @ p["down"].T

    model = refused.model(unsummed)
    model = fp.Model(refused.PARAMS, [layer for layer in model.layers if layer.name != "before"], model.loss)
    with pytest.raises(
        MissingCollective, match=re.escape("the loss differs along tp: every rank would train on a loss of its")
    ):
        fp.compose(fp.shard_tp())(model)


def test_a_loss_that_is_summed_over_the_data_axes_by_the_model_is_refused():
    def summed(p, x, par):
        total, count = refused.loss(p, x, par)
        return par.psum(total, "dp"), count

    model = fp.Model(refused.PARAMS, refused.model(refused.right).layers, summed)
    with pytest.raises(SuperfluousCollective, match="the loss is the same on every rank of dp"):
        fp.compose(fp.dp_reduce())(model)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda p, x, par: x.sum(), "the loss returns a pair (sum, count) whose sum is a tensor without dims."),
        (lambda p, x, par: (x, 1), "the loss returns a pair (sum, count) whose sum is a tensor without dims."),
        (lambda p, x, par: (1.0, 1), "the loss returns a pair (sum, count) whose sum is a tensor without dims."),
        (lambda p, x, par: (x.detach().sum(), 1), "the loss does not depend on any trainable parameter."),
    ],
    ids=["no pair", "not a scalar", "a number", "detached"],
)
def test_a_loss_of_another_form_is_refused(loss, message):
    model = fp.Model(refused.PARAMS, refused.model(refused.right).layers, loss)
    with pytest.raises(ModelError, match=re.escape(message)):
        fp.compose()(model)


def test_a_field_that_the_batch_does_not_describe_is_refused_with_the_fix():
    def reads(p, batch, par):
        return p[batch["tokens"]] * batch["weights"]

    layers = [("embed", "table", reads), *refused.model(refused.right).layers[1:]]
    message = "describe others with fp.Model(..., batch={name: fp.Input(shape, dtype)})"
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        fp.compose()(fp.Model(refused.PARAMS, layers, refused.loss))
    matched(caught.value, "layer 'embed' failed while it was traced")
    matched(caught.value, "test_program.py:")


def test_a_layer_that_raises_is_told_with_its_line():
    def raises(p, x, par):
        return refused.right(p, x.view(3, 5), par)

    with pytest.raises(ModelError, match="layer 'mlp' failed while it was traced, at ") as caught:
        refused.program(raises)
    matched(caught.value, "return refused.right(p, x.view(3, 5), par)")


def test_a_weight_read_whole_and_by_split_computation_is_refused_with_both_lines():
    def whole(p, x, par):
        return x * p

    def split(p, x, par):
        h = par.slice(x, "tp", 1)
        return par.all_gather(h * p, "tp", 1, to="replicated")

    def right(p, x, par):
        h = par.slice(x, "tp", 1)
        return par.all_gather(h * par.pvary(p, "tp"), "tp", 1, to="replicated")

    params = {"table": refused.PARAMS["table"], "w": fp.Param((4,), "embed"), "out": refused.PARAMS["out"]}

    def program(second):
        layers = [
            ("embed", "table", refused.embed),
            ("whole", "w", whole),
            ("split", "w", second),
            ("head", "out", refused.head),
        ]
        return fp.compose(fp.shard_tp())(fp.Model(params, layers, refused.loss))

    with pytest.raises(
        MissingCollective, match=r"w is read whole in one place .* and by computation that is split"
    ) as caught:
        program(split)
    for part in ("layer 'whole'", "layer 'split'", "return x * p", "par.pvary(w, 'tp')"):
        matched(caught.value, part)
    assert program(right).plan(Mesh(tp=2)).specs["w"].owes == ()


def test_a_plan_for_what_is_no_mesh_is_refused():
    with pytest.raises(fp.MeshError, match=re.escape("a plan for None: give an fp.Mesh, such as fp.Mesh(dp=2, tp=2).")):
        fp.compose()(small_gpt()).plan(None)
