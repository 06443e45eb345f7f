"""Every error message of the package, found in its source: where it is made, and the words of which it is made.

A *place* is a statement or call that makes an error: ``raise X(...)``, an ``X(...)`` that is returned, a call of a helper
that only raises, a line printed to stderr. A *text* is a part of a message that is there in some cases only: a branch of a
conditional, a default, what a helper returns, an entry of a table. ``raises.py`` sees to it that tests match both.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from functional_par import errors

REASONS = ("why", "consequence")
"""Attributes that hold a part of a message."""

METHODS = ("format", "removesuffix", "get")
"""Methods of a text or table whose result has its words; those of join's argument come on top."""


@dataclass(frozen=True, order=True)
class Site:
    """A place or a text, by its file and lines; ``parts`` are its words, without what a value fills in."""

    file: str
    first: int
    last: int
    kind: str
    parts: tuple[str, ...]

    def __str__(self) -> str:
        shown = " .. ".join(" ".join(part.split()) for part in self.parts)
        return f"{self.file}:{self.first}: {self.kind}: {shown[:100]}"

    @property
    def letters(self) -> int:
        """Of its own."""
        return len(re.findall("[a-zA-Z]", "".join(self.parts)))

    def spans(self, message: str) -> Iterator[tuple[int, int]]:
        """From where to where its words stand in a message, in their order. (A regular expression with as many holes can take
        ages to find that they do not.)"""
        start = message.find(self.parts[0]) if all(part in message for part in self.parts) else -1
        while start >= 0:
            end = start
            for part in self.parts:
                if (at := message.find(part, end)) < 0:
                    return
                end = at + len(part)
            yield start, end
            start = message.find(self.parts[0], start + 1)


@dataclass(frozen=True)
class Scope:
    """Where a name is looked up: a function, or a module, of one file."""

    file: str
    node: ast.AST
    module: ast.Module
    package: Package
    followed: frozenset[str] = frozenset()

    def follow(self, name: str) -> Scope:
        return replace(self, followed=self.followed | {name})


class Package:
    """The modules of a package, by file."""

    def __init__(self, folder: Path) -> None:
        paths = sorted(folder.rglob("*.py"))
        self.modules = {path.relative_to(folder.parent).as_posix(): ast.parse(path.read_text()) for path in paths}
        nodes = [(file, module, node) for file, module in self.modules.items() for node in ast.walk(module)]
        self.functions = [Scope(f, n, m, self) for f, m, n in nodes if isinstance(n, ast.FunctionDef)]
        self.reasons = [
            (name, Scope(f, m, m, self), value) for f, m, n in nodes for name, value in _reasons(n) if name in REASONS
        ]

        self.classes = {n.name for *_, n in nodes if isinstance(n, ast.ClassDef) and any(map(_is_known_error, n.bases))}
        self.named: dict[str, list[Scope]] = {}
        for scope in self.functions:
            self.named.setdefault(_name(scope.node), []).append(scope)

    def find(self, name: str, file: str) -> list[Scope]:
        """The functions of that name: of the file itself if it has one."""
        named = self.named.get(name, [])
        return [at for at in named if at.file == file] or named

    def is_error(self, node: ast.AST | None) -> bool:
        """A class of errors, or ``type(error)``."""
        return (
            (_name(node.func) == "type")
            if isinstance(node, ast.Call)
            else (_name(node) in self.classes or _is_known_error(node))
        )

    def makes_error(self, function: ast.AST) -> bool:
        """It is a helper that returns an error."""
        returned = [node.value for node in own(function) if isinstance(node, ast.Return)]
        return bool(returned) and all(isinstance(value, ast.Call) and self.is_error(value.func) for value in returned)

    def sites(self) -> tuple[Site, ...]:
        """All places and texts, in their order."""
        scopes = [*self.functions, *(Scope(file, module, module, self) for file, module in self.modules.items())]
        return tuple(sorted({site for scope in scopes for node in own(scope.node) for site in _sites(node, scope)}))


def _sites(node: ast.AST, scope: Scope) -> Iterator[Site]:
    call = node.exc if isinstance(node, ast.Raise) else node
    if not isinstance(call, ast.Call) or not call.args:
        return
    name, text = _name(call.func), call.args[0]
    if name == "SystemExit" and not _words(text):
        return  # an exit code
    called = [at.node for at in scope.package.find(name, scope.file) if isinstance(at.node, ast.FunctionDef)]
    helps = any(map(_only_raises, called)) or (call is not node and any(map(scope.package.makes_error, called)))
    if scope.package.is_error(call.func) or helps:
        yield _site(node, "place", text, scope)
        yield from (site for argument in call.args for site in _inside(argument, scope))
    elif _prints(call) or any(map(_prints_argument, called)):
        yield from _texts(text, scope)


def _site(node: ast.expr | ast.stmt, kind: str, text: ast.AST, scope: Scope) -> Site:
    return Site(scope.file, node.lineno, node.end_lineno or 0, kind, tuple(_words(text)))


def _words(node: ast.AST) -> list[str]:
    """The literal parts of a text."""
    if isinstance(node, ast.Constant):
        whole = node.value if isinstance(node.value, str) else ""
        return [word for word in re.split(r"\{\w*(?:![rsa])?\}", whole) if word]
    if isinstance(node, ast.JoinedStr):
        return [word for value in node.values for word in _words(value)]
    if isinstance(node, ast.BinOp):
        return _words(node.left) + _words(node.right)
    return []


def _inside(node: ast.AST, scope: Scope) -> Iterator[Site]:
    """Texts that may fill the holes of a text."""
    if isinstance(node, ast.JoinedStr):
        for value in node.values:
            if isinstance(value, ast.FormattedValue):
                yield from _texts(value.value, scope)
    elif isinstance(node, ast.BinOp):
        yield from (*_inside(node.left, scope), *_inside(node.right, scope))
    elif not isinstance(node, ast.Constant):
        yield from _texts(node, scope)


def _texts(node: ast.AST, scope: Scope) -> Iterator[Site]:
    """Texts that an expression may stand for."""
    if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
        site = _site(node, "text", node, scope)
        if re.search("[a-z]{4}", " ".join(site.parts)):
            yield site
        yield from _inside(node, scope)
        return
    for choice, where in _choices(node, scope):
        yield from _texts(choice, where)


def _choices(node: ast.AST, scope: Scope) -> Iterable[tuple[ast.AST, Scope]]:
    """What an expression may be, and where that is to be understood."""
    if isinstance(node, ast.IfExp):
        return [(node.body, scope), (node.orelse, scope)]
    if isinstance(node, ast.BoolOp | ast.Dict | ast.List | ast.Tuple):
        values = node.elts if isinstance(node, ast.List | ast.Tuple) else node.values
        return [(value, scope) for value in values]
    if isinstance(node, ast.Starred | ast.Subscript | ast.NamedExpr):
        return [(node.value, scope)]
    if isinstance(node, ast.Name) and node.id not in scope.followed:
        outer = replace(scope, node=scope.module)
        return [(value, at.follow(node.id)) for at in (scope, outer) for value in _assigned(at.node, node.id)]
    if isinstance(node, ast.Attribute):
        return [(value, at) for name, at, value in scope.package.reasons if name == node.attr]
    return _called(node, scope) if isinstance(node, ast.Call) else []


def _called(node: ast.Call, scope: Scope) -> Iterable[tuple[ast.AST, Scope]]:
    """The text or table whose method is called with its arguments, or what a function of the package returns."""
    name = _name(node.func)
    if isinstance(node.func, ast.Attribute) and name in (*METHODS, "join"):
        return [(part, scope) for part in (node.func.value, *(node.args if name == "join" else ()))]
    return [
        (returned.value, replace(at, followed=scope.followed | {name}))
        for at in scope.package.find(name, scope.file)
        if name not in scope.followed and _is_text(at.node.returns)
        for returned in own(at.node)
        if isinstance(returned, ast.Return) and returned.value
    ]


@functools.cache
def own(scope: ast.AST) -> tuple[ast.AST, ...]:
    """The nodes of a function or module, without those of functions in it."""
    found, todo = [], list(ast.iter_child_nodes(scope))
    while todo:
        node = todo.pop()
        if not isinstance(node, ast.FunctionDef):
            found.append(node)
            todo += ast.iter_child_nodes(node)
    return tuple(found)


def _assigned(scope: ast.AST, name: str) -> Iterator[ast.AST]:
    for node in own(scope):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if value is not None and any(isinstance(t, ast.Name) and t.id == name for t in targets):
            yield value


def _reasons(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.keyword) and node.arg:
        yield node.arg, node.value
    if isinstance(node, ast.AnnAssign | ast.Assign) and node.value:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield _name(target), node.value


def _name(node: ast.AST | None) -> str:
    """The last part of a name with dots; a function's own."""
    return getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", None) or ""


def _is_known_error(node: ast.AST | None) -> bool:
    found = getattr(errors, _name(node), None) or getattr(builtins, _name(node), None)
    return isinstance(found, type) and issubclass(found, BaseException) and found is not BaseException


def _is_text(annotation: ast.AST | None) -> bool:
    """``str``, or ``str | None``."""
    return _name(annotation.left if isinstance(annotation, ast.BinOp) else annotation) == "str"


def _prints(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute) and call.func.attr == "write":
        return _name(call.func.value) == "stderr"
    return _name(call.func) == "print" and any(k.arg == "file" and _name(k.value) == "stderr" for k in call.keywords)


def _only_raises(function: ast.FunctionDef) -> bool:
    return _name(function.returns) == "NoReturn" and any(isinstance(node, ast.Raise) for node in own(function))


def _prints_argument(function: ast.FunctionDef) -> bool:
    names = {argument.arg for argument in function.args.args}
    printed = [c.args[0] for c in own(function) if isinstance(c, ast.Call) and _prints(c) and c.args]
    return any(isinstance(text, ast.Name) and text.id in names for text in printed)
