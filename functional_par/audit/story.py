"""One layer, operation by operation, on the ranks beside the single process; finds the first that goes wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from functional_par.audit.layout import Grid, Layout, find
from functional_par.audit.record import Key, LayerLog, Node, by_key
from functional_par.trace.place import Place


@dataclass(frozen=True)
class Moment:
    """One operation in the single process and on all ranks.

    Attributes:
        node: on the first rank.
        whole: what it gave in the single process.
        grid: what it gave on the ranks.
        layout: what explains the grid; None if nothing does.
    """

    node: Node
    whole: Tensor
    grid: Grid
    layout: Layout | None


class Story:
    """What a layer did, with every operation recorded."""

    def __init__(self, single: LayerLog, ranks: Sequence[Sequence[LayerLog]]) -> None:
        self.single, self.first = by_key(single.nodes), ranks[0][0]
        self.ranks: list[list[Mapping[Key, Node]]] = [[by_key(log.nodes) for log in parts] for parts in ranks]
        self._moments: dict[int, Moment | None] = {}

    def moment(self, index: int) -> Moment | None:
        """The operation of that index; None where it has no counterpart in the single process."""
        if index not in self._moments:
            self._moments[index] = self._make(self.first.nodes[index])
        return self._moments[index]

    def _make(self, node: Node) -> Moment | None:
        whole = self.single.get(node.key)
        found = [[each.get(node.key) for each in parts] for parts in self.ranks]
        if whole is None or whole.value is None:
            return None
        grid: list[list[Tensor]] = []
        for parts in found:
            row = [each.value for each in parts if each is not None and each.value is not None]
            if len(row) < len(parts):
                return None
            grid.append(row)
        return Moment(node, whole.value, grid, find(whole.value, grid))

    def inputs(self, index: int) -> list[tuple[int, Moment]]:
        """What an operation was given, as far as it is known."""
        found = []
        for i in self.first.nodes[index].inputs:
            if (moment := self.moment(i)) is not None:
                found.append((i, moment))
        return found

    def roots(self, wrong: Sequence[int]) -> tuple[list[int], list[int]]:
        """The operations on the way to wrong outputs that are wrong though what they were given is right: those that give
        floating-point numbers, then those that give integers.

        Integers that follow from the rank's position differ by design: their reader is to blame.
        """
        ends = [self.first.ends[i] for i in wrong if i in self.first.ends]
        floats = sorted(set(self._roots(ends, through_integers=False)))
        return floats, sorted(set(self._roots(ends, through_integers=True)) - set(floats))

    def _roots(self, ends: Sequence[int], through_integers: bool) -> Iterator[int]:
        todo, seen = list(ends), set()
        while todo:
            at = todo.pop()
            if at in seen:
                continue
            seen.add(at)
            moment = self.moment(at)
            if moment is not None and moment.layout is not None:
                continue
            suspects = [i for i in self.first.nodes[at].inputs if self._suspect(i, through_integers)]
            if suspects:
                todo += suspects
            elif moment is not None:
                yield at

    def _suspect(self, index: int, through_integers: bool) -> bool:
        """Whether an input is itself wrong, or unknown with something wrong behind it."""
        node, moment = self.first.nodes[index], self.moment(index)
        if moment is None:
            return any(self._suspect(i, through_integers) for i in node.inputs)
        if moment.layout is not None:
            return False
        integral = not (moment.whole.is_floating_point() or moment.whole.is_complex())
        return not integral or (through_integers and not node.aware)

    def floats_before(self, index: int) -> dict[str, Tensor]:
        """The layer's values up to an operation, in the single process, by what to call them: its leaves and inputs first."""
        named: dict[str, Tensor] = {}
        near = self.first.nodes[index].place
        for node in self.first.nodes[:index]:
            whole = self.single.get(node.key)
            if whole is not None and whole.value is not None and whole.value.is_floating_point():
                named.setdefault(label(node, near), whole.value)
        return named


def label(node: Node, near: Place) -> str:
    """What to call a value in a sentence about another line, or the same."""
    if node.name.startswith("leaf "):
        return f"leaf {node.name.removeprefix('leaf ')}"
    if node.name.startswith("batch "):
        return f"par.batch[{node.name.removeprefix('batch ')!r}]"
    if node.name == "input":
        return "the layer's input"
    if node.name == "unrecorded":
        return operation(node)
    return f"the result of {operation(node)}" + ("" if node.place == near else f" at {node.place}")


def operation(node: Node) -> str:
    """What to call the operation itself. What torch.func computes, or a value from outside the layer, is not recorded."""
    if node.name == "unrecorded":
        return "what is computed out of sight"
    return node.place.inside or node.name.removeprefix("kernel ")
