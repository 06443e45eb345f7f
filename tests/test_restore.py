"""Training that goes on in another layout: whole trees out of one step, into another."""

from __future__ import annotations

import re

import pytest
import torch

import functional_par as fp
from functional_par import Mesh, StateError, tree

from . import oracle
from .toys import small_gpt

BATCHES = [oracle.token_batch(13, 12, 4, seed) for seed in range(4)]
TRANSFORMS = {
    "one": (fp.tie("head.weight", "embed.weight"),),
    "ranks": (
        fp.tie("head.weight", "embed.weight"),
        fp.shard_tp("REDUCE_SCATTER"),
        fp.stage_pp(microbatches=2),
        fp.dp_reduce(),
    ),
}
MESHES = {"one": Mesh(), "ranks": Mesh(pp=2, dp=2, tp=2)}


def go_on(kind, batches, trees=None, optimizer=None):
    """Train on some ranks from whole trees; return whole trees."""
    program = fp.compose(*TRANSFORMS[kind])(small_gpt())

    def main(world):
        step = program.step(world, optimizer or oracle.adamw(), clip=0.5, dtype=torch.float64)
        state = step.load(**trees) if trees else step.init(0)
        for batch in batches:
            state, _ = step(state, batch)
        return {"params": step.gather(state), "opt": step.gather_opt(state), "step": state.step, "seed": state.seed}

    found = fp.run(main, MESHES[kind], backend="threads")
    for other in found[1:]:
        for path, x in tree.flatten({"p": other["params"], "o": other["opt"]}).items():
            assert torch.equal(x, tree.get({"p": found[0]["params"], "o": found[0]["opt"]}, path)), path
    return found[0]


def flat(trees):
    return tree.flatten({"params": trees["params"], "opt": trees["opt"]})


def test_parameters_moments_and_step_number_move_between_layouts_in_the_middle_of_training():
    all_along = go_on("one", BATCHES)
    first = go_on("ranks", BATCHES[:2])
    moved = go_on("one", BATCHES[2:3], first)
    back = go_on("ranks", BATCHES[3:], moved)
    assert (back["step"], back["seed"]) == (4, 0)
    expected, found = flat(all_along), flat(back)
    assert expected.keys() == found.keys()
    for path, x in expected.items():
        oracle.close(found[path], x, path)


def test_loading_what_was_gathered_changes_no_bit():
    trees = go_on("ranks", BATCHES[:2])
    again = go_on("ranks", [], trees)
    for path, x in flat(trees).items():
        assert torch.equal(flat(again)[path], x), path


def step_of(optimizer=None, dtype=torch.float32):
    program = fp.compose(*TRANSFORMS["one"])(small_gpt())
    return fp.run(lambda world: program.step(world, optimizer or oracle.adamw(), dtype=dtype), Mesh())[0]


def params():
    whole = tree.flatten(small_gpt().init(1, torch.float64))
    return whole | {"head.weight": whole["embed.weight"]}


def test_leaves_are_cast_and_the_optimizer_starts_afresh_without_its_state():
    state = step_of().load(tree.unflatten(params()), step=7, seed=3)
    assert (state.step, state.seed) == (7, 3)
    assert all(x.dtype == torch.float32 for x in state.flat.values())
    assert all(not x.any() for slot in state.flat_opt.values() for x in slot.values())
    assert torch.equal(state.flat["embed.weight"], params()["embed.weight"].float())


def test_what_is_loaded_has_memory_of_its_own():
    whole = params()
    state = step_of(dtype=torch.float64).load(tree.unflatten(whole))
    state.flat["embed.weight"].zero_()
    assert whole["embed.weight"].any()


def test_a_tied_leaf_may_go_by_either_name():
    for name in ("embed.weight", "head.weight"):
        given = {path: x for path, x in params().items() if path != name}
        loaded = step_of().load(tree.unflatten(given)).flat["embed.weight"]
        assert torch.equal(loaded, params()["embed.weight"].float())


def wrong_trees():
    whole = params()
    moments = {"exp_avg": tree.unflatten(whole), "exp_avg_sq": tree.unflatten(whole)}
    missing = {path: x for path, x in whole.items() if path != "norm.weight"}
    return {
        "missing": ({"params": missing}, "load(params): the tree has no tensor norm.weight [8]."),
        "unknown": (
            {"params": whole | {"nrom.weight": torch.ones(8)}},
            "load(params): the model has no leaf nrom.weight.",
        ),
        "shape": (
            {"params": whole | {"norm.weight": torch.ones(4)}},
            "load(params): norm.weight has shape [4], but the model has embed [8]. Give whole leaves",
        ),
        "tied": (
            {"params": whole | {"head.weight": whole["head.weight"] + 1}},
            "load(params): embed.weight and head.weight are tied in this program, but the tree has different values",
        ),
        "slots": (
            {"params": whole, "step": 1, "opt": {"momentum": moments["exp_avg"]}},
            "load(opt=...): it has the slots momentum, but adamw keeps exp_avg, exp_avg_sq.",
        ),
        "moment": (
            {"params": whole, "step": 1, "opt": moments | {"exp_avg": tree.unflatten(missing)}},
            "load(opt['exp_avg']): the tree has no tensor norm.weight [8].",
        ),
        "array": (
            {"params": whole | {"norm.weight": whole["norm.weight"].numpy()}},
            "load(params): norm.weight is of type ndarray; every leaf is a whole tensor.",
        ),
        "tied array": (
            {"params": whole | {"head.weight": None}},
            "load(params): head.weight is of type NoneType; every leaf is a whole tensor.",
        ),
        "meta": (
            {"params": whole | {"head.weight": whole["head.weight"].to("meta")}},
            "load(params): head.weight is on the meta device, without data; give its values",
        ),
        "sparse": (
            {"params": whole | {"norm.weight": whole["norm.weight"].to_sparse()}},
            "load(params): norm.weight is of layout torch.sparse_coo; give its values",
        ),
        "complex": (
            {"params": whole | {"norm.weight": whole["norm.weight"] + 0j}},
            "load(params): norm.weight is of torch.complex128; the imaginary part would be lost.",
        ),
        "no slots": (
            {"params": whole, "opt": 3, "step": 1},
            "load(opt=...): a dict of slots, as step.gather_opt returns it, not int.",
        ),
        "no slot": (
            {"params": whole, "opt": moments | {"exp_avg": 3}, "step": 1},
            "load(opt['exp_avg']): a nested dict of whole leaves, not int.",
        ),
        "seed": ({"params": whole, "seed": 1.5}, "load(seed=1.5): the seed of a run is an integer."),
        "no step": (
            {"params": whole, "opt": moments},
            "load(opt=...) without step=...: say how many steps made it, by which rate and bias correction go on.",
        ),
        "step": ({"params": whole, "step": -1}, "load(step=-1): the number of steps done is an integer of at least 0."),
    }


@pytest.mark.parametrize("name", wrong_trees())
def test_a_tree_that_does_not_fit_is_refused_with_the_leaf_and_the_reason(name):
    options, message = wrong_trees()[name]
    options = options | {"params": tree.unflatten(options["params"])}
    with pytest.raises(StateError, match=re.escape(message)):
        step_of().load(**options)


def test_a_tree_that_is_none_is_refused():
    with pytest.raises(StateError, match=re.escape("load(params): a nested dict of whole leaves, not NoneType.")):
        step_of().load(None)


def test_leaves_with_a_gradient_leave_it_behind_and_tied_names_may_differ_in_dtype():
    given = params()
    given["norm.weight"] = torch.nn.Parameter(given["norm.weight"])
    given["embed.weight"] = given["embed.weight"].float()
    given["head.weight"] = given["embed.weight"].double().requires_grad_()
    flat = step_of().load(tree.unflatten(given)).flat
    assert not any(x.requires_grad for x in flat.values())
    assert torch.equal(flat["norm.weight"], given["norm.weight"].detach().float())


@pytest.mark.parametrize("wrong", ["norm.weight", "position.weight"])
def test_every_rank_refuses_what_only_some_stage_holds(wrong):
    program = fp.compose(*TRANSFORMS["ranks"])(small_gpt())
    given = tree.unflatten({path: x for path, x in params().items() if path != wrong})

    def main(world):
        with pytest.raises(StateError, match=f"the tree has no tensor {wrong}"):
            program.step(world, oracle.adamw()).load(given)

    fp.run(main, MESHES["ranks"], backend="threads")
