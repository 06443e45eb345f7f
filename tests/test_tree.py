"""Nested dicts and dotted paths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_par import ModelError, tree

keys = st.text("abc01", min_size=1, max_size=3)
trees = st.recursive(
    st.integers(), lambda inner: st.dictionaries(keys, inner, min_size=1, max_size=3), max_leaves=12
).filter(lambda t: isinstance(t, dict))


@given(trees)
def test_unflatten_is_the_inverse_of_flatten(nested):
    flat = tree.flatten(nested)
    assert tree.unflatten(flat) == nested
    assert list(tree.flatten(tree.unflatten(flat))) == list(flat)
    assert {path: tree.get(nested, path) for path in flat} == flat


@given(trees)
def test_map_leaves_keeps_the_structure_and_passes_paths(nested):
    assert tree.flatten(tree.map_leaves(lambda path, leaf: (path, leaf), nested)) == {
        path: (path, leaf) for path, leaf in tree.flatten(nested).items()
    }


def test_paths_come_in_the_order_of_the_dicts():
    assert list(tree.paths({"b": {"y": 1, "x": 2}, "a": 3})) == [("b.y", 1), ("b.x", 2), ("a", 3)]


def test_leaves_are_anything_but_dicts():
    assert tree.flatten({"a": [1, 2], "b": {"c": (3,)}}) == {"a": [1, 2], "b.c": (3,)}


def test_get_finds_leaves_and_subtrees():
    nested = {"a": {"b": {"c": 1}}}
    assert tree.get(nested, "a.b") == {"c": 1}
    assert tree.get(nested, "a.b.c") == 1


@pytest.mark.parametrize("path", ["x", "a.x", "a.b.c", ""])
def test_get_raises_with_the_path_it_did_not_find(path):
    with pytest.raises(KeyError, match=f"^{path!r}$") as caught:
        tree.get({"a": {"b": 1}}, path)
    assert caught.value.args == (path,)


@pytest.mark.parametrize("key", ["a.b", "", 3, None])
def test_a_key_that_is_no_name_is_refused(key):
    message = "a key of a parameter tree is a non-empty string without a dot"
    with pytest.raises(ModelError, match=message) as caught:
        tree.flatten({"outer": {key: 1}})
    assert str(caught.value).startswith(f"outer.{key!r}: ")
