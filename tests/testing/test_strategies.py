"""What the strategies draw is admitted, and among it is every special case that they promise."""

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

import functional_par as fp
from functional_par.run_par import RunPar
from functional_par.testing import strategies
from functional_par.testing.batch import IGNORED
from functional_par.testing.free import free_model
from functional_par.testing.layout import refusal, shares_leaves
from functional_par.transforms import ShardTP

HEADED = free_model(["attention", "rms norm"])
FREE = free_model(["plain mlp", "again"], seq=3, weighted=True)


def drawn(strategy, condition):
    """An example of the condition; hypothesis raises where there is none."""
    found = find(strategy, condition, settings=settings(max_examples=2000, phases=[Phase.generate]))
    assert condition(found)
    return found


@pytest.mark.parametrize("axis", strategies.USED)
def test_meshes_have_any_axis_and_at_most_so_many_ranks(axis):
    assert drawn(strategies.meshes(6), lambda mesh: getattr(mesh, axis) == 3).size <= 6
    drawn(strategies.meshes(6, [axis]), lambda mesh: mesh.size == getattr(mesh, axis) == 6)


@given(strategies.meshes(6, ("tp", "pp")))
def test_meshes_are_no_larger_than_asked_along_no_other_axis(mesh):
    assert mesh.size == mesh.tp * mesh.pp <= 6


@pytest.mark.parametrize(
    ("strategy", "all_of_it"),
    [
        (strategies.modes(), {"ALL_REDUCE", "REDUCE_SCATTER"}),
        (strategies.schedules(), {("afab", None), ("zbv", None), ("interleaved", 3)}),
    ],
    ids=["modes", "schedules"],
)
def test_names_are_those_of_the_library(strategy, all_of_it):
    for name in all_of_it:
        drawn(strategy, lambda found, name=name: found == name)


@given(st.integers(2, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(2, n))), st.data())
def test_splits_give_each_stage_a_layer_and_all_layers_a_stage(sizes, data):
    layers, stages = sizes
    split = data.draw(strategies.splits(layers, stages))
    assert split is None or (len(split) == stages and sum(split) == layers and min(split) >= 1)


def test_splits_are_uneven_too():
    drawn(strategies.splits(5, 2), lambda split: split == (4, 1))
    drawn(strategies.splits(5, 2), lambda split: split is None)


MESH = fp.Mesh(dp=2, pp=2, tp=3)
SPECS = {
    "a dim that tp does not divide": lambda spec: any(
        a == "tp" and n % 3 for n, a in zip(spec.shape, spec.axes, strict=True)
    ),
    "a rank with nothing": lambda spec: any(a == "tp" and n == 1 for n, a in zip(spec.shape, spec.axes, strict=True)),
    "no dims": lambda spec: spec.shape == (),
    "two stages": lambda spec: spec.owners == (0, 1),
    "the last stage alone": lambda spec: spec.owners == (1,),
    "owes pp and dp": lambda spec: [debt.axis for debt in spec.owes] == ["pp", "dp"],
    "frozen": lambda spec: not spec.trainable,
    "cut twice": lambda spec: {"dp", "tp"} <= set(spec.axes),
}


@pytest.mark.parametrize("case", SPECS)
def test_specs_have(case):
    drawn(strategies.specs(MESH), SPECS[case])


@given(strategies.specs(MESH))
def test_a_spec_owes_no_axis_that_cuts_it_and_its_shards_hold_each_element_once(spec):
    assert not {debt.axis for debt in spec.owes} & set(spec.axes)
    elements = torch.zeros(spec.shape)
    for coords in MESH:
        if spec.counted_by(coords):
            starts, sizes = spec.starts(MESH, coords), spec.local_shape(MESH)
            elements[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))] += 1
    assert torch.equal(elements, torch.ones(spec.shape))


def some(strategy, n):
    """``n`` examples."""
    seen = []

    @settings(max_examples=n, database=None, phases=[Phase.generate])
    @given(strategy)
    def collect(example):
        seen.append(example)

    collect()
    return seen


@pytest.fixture(scope="module")
def many_layouts():
    return some(strategies.layouts(HEADED), 300)


LAYOUTS = {
    "the largest tp that heads admit": lambda layout: layout.mesh.tp == 4,
    "stages split by hand, unevenly": lambda layout: layout.split == (1, 3),
    "fewer microbatches than stages": lambda layout: layout.microbatches < layout.mesh.pp,
    "sequences split": lambda layout: layout.mode == "REDUCE_SCATTER" and layout.mesh.tp == 2,
    "overlapping": lambda layout: layout.async_comm and layout.mesh.tp > 1,
    "ep and dp": lambda layout: layout.mesh.ep == layout.mesh.dp == 2,
    "a schedule with several stages a rank": lambda layout: layout.stages > layout.mesh.pp > 1,
    "the other engine": lambda layout: layout.engine == "tape",
    "all axes but one": lambda layout: layout.mesh == fp.Mesh(pp=2, tp=2),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts_have(case, many_layouts):
    assert any(map(LAYOUTS[case], many_layouts))


def test_no_layout_ties_leaves_unless_asked(many_layouts):
    assert not [layout for layout in many_layouts if layout.ties]
    drawn(strategies.layouts(FREE, axes=("dp",), ties=True), lambda layout: layout.ties == (("head", "embed"),))


@settings(max_examples=10)
@given(strategies.layouts(FREE, fp.tie("embed", "head"), max_ranks=5, ties=True))
def test_a_layout_has_a_plan(layout):
    program = layout.program(FREE, fp.tie("embed", "head"))
    assert program.plan(layout.mesh).mesh == layout.mesh
    # 12 hidden features, 3 positions.
    assert layout.mesh.tp in (1, 2, 3, 4)
    assert layout.mode == "ALL_REDUCE" or layout.mesh.tp in (1, 3)


def test_a_layout_takes_the_dims_of_the_shard_tp_that_it_is_given():
    padded = fp.shard_tp(dims={"ffn": "pad", "vocab": "pad"})
    layout = drawn(strategies.layouts(FREE, padded, max_ranks=5), lambda layout: layout.mesh.tp == 5)
    (shard,) = (t for t in layout.transforms(padded) if isinstance(t, ShardTP))
    assert (dict(shard.dims), shard.mode.value) == ({"ffn": "pad", "vocab": "pad"}, layout.mode)
    assert layout.program(FREE, padded).plan(layout.mesh).specs["layer0.up"].local_shape(layout.mesh) == (3, 4)


def test_axes_modes_and_stages_of_layouts_are_those_asked_for():
    found = some(strategies.layouts(HEADED, axes=("pp", "tp"), modes=("REDUCE_SCATTER",), stages=2), 50)
    assert fp.Mesh(pp=2, tp=2) in [layout.mesh for layout in found]
    assert all(layout.mesh.dp == layout.mesh.ep == 1 and layout.mesh.pp > 1 for layout in found)
    assert {layout.mode for layout in found} == {"REDUCE_SCATTER"}


def test_a_wrong_collective_is_not_taken_for_a_size_that_does_not_divide():
    def unsummed(p, x, par):
        return x + (par.pvary(x, "tp") @ p["up"].T) @ p["down"].T

    wrong = fp.Model(FREE.params, [FREE.layers[0], ("mlp", "layer0", unsummed), FREE.layers[-1]], FREE.loss)
    with pytest.raises(fp.TraceError, match="layer 'mlp'"):
        drawn(strategies.layouts(wrong, axes=("tp",)), lambda layout: layout.mesh.tp > 1)


def test_why_a_layout_is_refused_is_told():
    layout = fp.testing.Layout(fp.Mesh(tp=2), "REDUCE_SCATTER")
    assert "3 = 1 * 2 + 1" in refusal(FREE, layout)
    assert refusal(FREE, fp.testing.Layout(fp.Mesh(tp=2))) == ""


def test_programs_come_with_a_mesh_that_they_have_a_plan_for():
    program, mesh = drawn(strategies.programs(FREE), lambda pair: pair[1] == fp.Mesh(dp=2, tp=2))
    fp.testing.assert_equivalent(program, mesh)


def labels_kept(batch):
    return (batch["labels"] != IGNORED).sum(1).tolist()


BATCHES = {
    "all labels": lambda batch: labels_kept(batch) == [3] * 4,
    "a row without labels among others": lambda batch: 0 in labels_kept(batch) and 3 in labels_kept(batch),
    "a row with some labels": lambda batch: {1, 2} & set(labels_kept(batch)),
    "a microbatch without labels": lambda batch: labels_kept(batch)[:2] == [0, 0] and sum(labels_kept(batch)) > 3,
    "no label at all": lambda batch: sum(labels_kept(batch)) == 0,
}


@pytest.mark.parametrize("case", BATCHES)
def test_batches_have(case):
    drawn(strategies.batches(FREE, 4, pieces=2), BATCHES[case])


@given(strategies.batches(FREE, 2))
def test_batches_are_what_the_model_takes(batch):
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == dict.fromkeys(
        ("tokens", "labels"), ((2, 3), torch.int64)
    )
    assert 0 <= batch["tokens"].min() <= batch["tokens"].max() < 5
    assert set(batch["labels"].flatten().tolist()) <= {IGNORED, *range(5)}


def test_open_sizes_are_drawn_in_units_and_floating_point_fields_have_their_dtype():
    model = free_model(seq=None, numbers=True)
    batch = drawn(strategies.batches(model, 3, unit=2), lambda batch: batch["target"].shape[1] == 6)
    assert batch["features"].shape == (3, 6, 3)
    assert (batch["features"].dtype, batch["target"].dtype) == (torch.float32, torch.float64)


def leaves_named(model, name):
    return [leaf for leaf in model.leaves.values() if name in leaf.names]


MODELS = {
    "a leaf read twice": shares_leaves,
    "head and embedding are one leaf": lambda model: "head" not in model.params and "embed" in model.layers[-1].paths,
    "a frozen leaf": lambda model: not all(leaf.trainable for leaf in model.leaves.values()),
    "a loss with a parameter": lambda model: model.loss.paths,
    "floating-point inputs": lambda model: any(given.dtype.is_floating_point for given in model.batch.values()),
    "an open sequence": lambda model: any(None in given.shape[1:] for given in model.batch.values()),
    "a layer without leaves": lambda model: any(not layer.paths for layer in model.layers),
    "one key/value head": lambda model: any(leaf.shape[0] == 1 for leaf in leaves_named(model, "kv_heads")),
    "grouped heads": lambda model: any(leaf.shape[0] == 2 for leaf in leaves_named(model, "kv_heads")),
    "an odd vocabulary": lambda model: any(leaf.shape[0] % 2 for leaf in leaves_named(model, "vocab")),
    "an odd width": lambda model: any(
        leaf.shape[leaf.names.index("embed")] % 2 for leaf in leaves_named(model, "embed")
    ),
    "a bias": lambda model: any("bias" in path for path in model.leaves),
    "positions": lambda model: "position.weight" in model.leaves,
    "two blocks of a llama": lambda model: "blocks.1.mlp.gate.weight" in model.leaves,
}


@pytest.mark.parametrize("case", MODELS)
def test_models_have(case):
    drawn(strategies.models(), MODELS[case])


def test_a_state_may_be_a_dict_with_integers_and_booleans():
    model = free_model(carries=True)
    batch = fp.testing.make_batch(model, 2)
    state = model.layers[0].fn(model.init(0)["embed"], batch, RunPar(batch=batch))
    assert {name: x.dtype for name, x in state.items() if not x.is_floating_point()} == {
        "ids": torch.int64,
        "odd": torch.bool,
    }


def test_a_model_that_cannot_be_tied_says_so():
    with pytest.raises(fp.ModelError, match=r"free_model\(tied=True\): the head and the embedding read one leaf only"):
        free_model(tied=True, numbers=True)
