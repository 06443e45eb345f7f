"""Ties: one leaf read in several places, whatever the places are called."""

from __future__ import annotations

import re
from itertools import permutations

import pytest

import functional_par as fp
from functional_par import CompositionError, Debt, Mesh, MeshError, Model, Param

from ..toys import small_gpt

W = Param((4, 3), "vocab embed")


def chain(**other):
    """Four leaves of one kind, each read by a layer of its own; ``first`` is read first."""
    params = {"d": W, "c": W, "b": W, "a": W} | other
    layers = [
        (name, name, lambda p, x, par: p * 1) for name in ("a", "b", "c", "d", *sorted(other.keys() - set("abcd")))
    ]
    return Model(params, layers, lambda p, x, par: (x.sum(), 1))


CHAIN = chain()


def tied(*transforms):
    return fp.compose(*transforms)(CHAIN).plan(Mesh())


def test_a_tie_makes_one_leaf_which_the_earliest_reader_names():
    for owners in permutations(("b", "d")):
        plan = tied(fp.tie(*owners))
        assert plan.aliases == {"d": "b"}
        assert list(plan.specs) == ["c", "b", "a"]
        assert [layer.paths for layer in plan.model.layers] == [("a",), ("b",), ("c",), ("b",)]
        assert list(plan.source.leaves) == ["d", "c", "b", "a"]


def test_chains_of_ties_are_one_class_in_any_order():
    whole = tied(fp.tie("a", "b", "c", "d"))
    assert whole.aliases == dict.fromkeys("bcd", "a")
    links = [fp.tie("a", "b"), fp.tie("b", "c"), fp.tie("c", "d")]
    for order in permutations(links):
        plan = tied(*order)
        assert (plan.aliases, plan.specs, plan.model) == (whole.aliases, whole.specs, whole.model)
    assert tied(fp.tie("c", "d"), fp.tie("a", "b")).aliases == {"b": "a", "d": "c"}


def test_a_tie_inside_one_stage_owes_nothing():
    plan = fp.compose(fp.tie("a", "b"), fp.stage_pp(split=[2, 2]))(chain()).plan(Mesh(pp=2))
    assert plan.specs["a"].owners == (0,)
    assert plan.specs["a"].owes == ()


def test_a_tie_across_stages_owes_pp_with_its_stages():
    plan = fp.compose(fp.tie("a", "d"), fp.stage_pp(split=[1, 2, 1]))(chain()).plan(Mesh(pp=3))
    assert plan.specs["a"].owners == (0, 2)
    assert plan.specs["a"].owes == (Debt("pp", "tied: read on stages 0, 2"),)
    assert plan.stage_leaves(2) == ("a",)


def test_reading_a_path_twice_across_stages_is_a_tie_without_the_word():
    model = Model(
        {"a": W}, [("x", "a", lambda p, x, par: p), ("y", "a", lambda p, x, par: x * p)], lambda p, x, par: (x.sum(), 1)
    )
    plan = fp.compose(fp.stage_pp())(model).plan(Mesh(pp=2))
    assert plan.specs["a"].owners == (0, 1)
    assert [debt.axis for debt in plan.specs["a"].owes] == ["pp"]


def test_the_order_of_the_owners_and_a_repeated_tie_do_not_matter():
    one = fp.compose(fp.tie("head.weight", "embed.weight"))(small_gpt())
    for transforms in ([fp.tie("embed.weight", "head.weight")], [fp.tie("head.weight", "embed.weight")] * 2):
        assert fp.compose(*transforms)(one.source).plan(Mesh()) == one.plan(Mesh())


def paired(a, d):
    tie = fp.tie(("a", a), ("d", d), reduce="sum")
    return fp.compose(tie, fp.stage_pp(split=[2, 2]), fp.dp_reduce(), fp.shard_tp(dims={}))(chain())


@pytest.mark.parametrize(("a", "d"), [((0, 1), (4, 5)), ([2, 3], [6, 7]), ((0,), (4,)), ((0,), (5,)), ((), ())])
def test_owners_named_by_rank_are_accepted_inside_one_replica(a, d):
    plan = paired(a, d).plan(Mesh(pp=2, dp=2, tp=2))
    plain = fp.compose(fp.tie("a", "d"), fp.stage_pp(split=[2, 2]), fp.dp_reduce(), fp.shard_tp(dims={}))(chain())
    assert plan.specs == plain.plan(Mesh(pp=2, dp=2, tp=2)).specs


@pytest.mark.parametrize(
    ("a", "d", "ranks"), [((0,), (6,), "0 and 6"), ((0, 2), (4, 6), "0 and 2"), ((3,), (4,), "3 and 4")]
)
def test_owners_in_different_replicas_are_refused(a, d, ranks):
    message = (
        f"tie('a', 'd'): ranks {ranks} lie in different data-parallel replicas of Mesh(pp=2, dp=2, tp=2). "
        "Replicas are kept equal by dp_reduce; a tie joins owners inside one replica."
    )
    with pytest.raises(CompositionError, match=re.escape(message)):
        paired(a, d).plan(Mesh(pp=2, dp=2, tp=2))


def test_an_owner_on_a_stage_that_does_not_read_the_leaf_is_refused():
    message = (
        "tie: d is named on rank 1, which runs stage 0 of Mesh(pp=2, dp=2, tp=2), but it is read on stage 1. "
        "Name ranks of that stage, or leave ranks out."
    )
    with pytest.raises(CompositionError, match=re.escape(message)):
        paired((0,), (1,)).plan(Mesh(pp=2, dp=2, tp=2))


def test_an_owner_that_the_mesh_does_not_have_is_refused():
    with pytest.raises(MeshError, match=re.escape("rank 8 is not in Mesh(pp=2, dp=2, tp=2): it has ranks 0 to 7.")):
        paired((0,), (8,)).plan(Mesh(pp=2, dp=2, tp=2))


@pytest.mark.parametrize(
    ("tie", "message"),
    [
        (("a", "x"), "tie('a', 'x'): no leaf 'x'. Leaves: "),
        (("a", "a.b"), "tie('a', 'a.b'): no leaf 'a.b'. Leaves: "),
        (
            ("a", "wide"),
            "tie('a', 'wide'): a has shape (4, 3), but wide has (5, 3). Tied leaves are one leaf: give both the",
        ),
        (("wide", "a"), "tie('wide', 'a'): wide has shape (5, 3), but a has (4, 3)."),
        (("a", "b", "named"), "tie('a', 'b', 'named'): a has dims 'vocab embed', but named has 'rows embed'."),
        (("a", "turned"), "tie('a', 'turned'): a has shape (4, 3), but turned has (3, 4)."),
        (("a", "frozen"), "tie('a', 'frozen'): a has trainable True, but frozen has False."),
    ],
    ids=str,
)
def test_leaves_that_are_not_alike_are_refused_at_compose(tie, message):
    model = chain(
        wide=Param((5, 3), "vocab embed"),
        named=Param((4, 3), "rows embed"),
        turned=Param((3, 4), "embed vocab"),
        frozen=Param((4, 3), "vocab embed", trainable=False),
    )
    with pytest.raises(CompositionError, match=re.escape(message)):
        fp.compose(fp.tie(*tie))(model)


@pytest.mark.parametrize("owners", [("a",), ("a", "a"), (("a", (0,)), ("a", (1,))), ()])
def test_a_tie_needs_two_leaves(owners):
    with pytest.raises(CompositionError, match=r"a tie joins at least two different leaves\."):
        fp.tie(*owners)


@pytest.mark.parametrize("owner", [3, ("a", 3), ("a", ("x",)), ("a",), ("a", (0,), 1), (3, (0,)), None], ids=str)
def test_an_owner_is_a_name_or_a_pair(owner):
    message = f"tie({owner!r}): an owner is a dotted name, or a pair (name, ranks) with a list of ranks."
    with pytest.raises(CompositionError, match=re.escape(message)):
        fp.tie(owner, "b")


@pytest.mark.parametrize("reduce", ["mean", "avg", None])
def test_only_a_sum_is_right(reduce):
    message = f"tie(reduce={reduce!r}): only 'sum' is right, since the derivative of a function that reads a leaf twice"
    with pytest.raises(CompositionError, match=re.escape(message)):
        fp.tie("a", "b", reduce=reduce)
