"""Nested dicts of leaves and their dotted paths. Nothing here knows what a leaf is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from functional_par.errors import ModelError

Tree = Mapping[str, Any]


def paths(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(dotted path, leaf)`` in the order of the dicts.

    >>> list(paths({"a": {"b": 1}, "c": 2}))
    [('a.b', 1), ('c', 2)]
    """
    for key, value in tree.items():
        if not isinstance(key, str) or not key or "." in key:
            raise ModelError(f"{prefix}{key!r}: a key of a parameter tree is a non-empty string without a dot.")
        if isinstance(value, Mapping):
            yield from paths(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def flatten(tree: Tree) -> dict[str, Any]:
    """The tree as one flat dict from dotted path to leaf."""
    return dict(paths(tree))


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``flatten``.

    >>> unflatten({"a.b": 1, "c": 2})
    {'a': {'b': 1}, 'c': 2}
    """
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, last = path.split(".")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def get(tree: Tree, path: str) -> Any:
    """The leaf or subtree at a dotted path; raises KeyError with the path when there is none."""
    node: Any = tree
    for key in path.split("."):
        if not isinstance(node, Mapping) or key not in node:
            raise KeyError(path)
        node = node[key]
    return node


def map_leaves(function: Callable[[str, Any], Any], tree: Tree) -> dict[str, Any]:
    """A tree of the same structure with ``function(path, leaf)`` at each leaf."""
    return unflatten({path: function(path, leaf) for path, leaf in paths(tree)})
