"""Draws free programs. A light guess of what every value varies over, kept along the way, bends the draw towards programs
that may be right; it decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from tests.trace.free import CUT, FROZEN, LEAVES, Block, Op, Program

NONE: frozenset[str] = frozenset()

FITS = 7
"""Of ten choices, about as many follow the guess."""


@dataclass(frozen=True)
class Guess:
    """What a value varies over, in which of these all ranks hold the same, whether a cotangent flows, whether it is data."""

    axes: frozenset[str] = NONE
    alike: frozenset[str] = NONE
    grad: bool = False
    data: bool = False


@dataclass
class Drawing:
    """One block while it is drawn."""

    draw: Any
    axes: tuple[str, ...]
    values: list[Guess]
    ops: list[Op] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    entered: int = 0

    def often(self, of_ten: int = FITS) -> bool:
        return bool(self.draw(st.integers(0, 9)) < of_ten)

    def pick(self, choices: Any) -> Any:
        return self.draw(st.sampled_from(sorted(choices)))

    def value(self) -> int:
        """A value, a late one more often."""
        n = len(self.values)
        return n - 1 - self.draw(st.integers(0, min(2, n - 1) if self.often() else n - 1))

    def number(self) -> int:
        return int(self.draw(st.integers(0, 2)))

    def push(self, op: Op, guess: Guess) -> int:
        self.used.update(op.args)
        anchor = tuple(axis for axis in self.axes if (axis == "tp") == (axis in guess.axes))
        self.ops.append(replace(op, anchor=anchor if guess.data and guess.grad else None))
        self.values.append(guess)
        return len(self.values) - 1

    def apply(self, kind: str, *args: int, **more: Any) -> int:
        """An operation of torch: the result varies over what its inputs vary over."""
        args = tuple(self.varied(i, args) for i in args)
        guesses = [self.values[i] for i in args]
        axes = NONE.union(*(g.axes for g in guesses)) | more.pop("extra", NONE)
        differs = NONE.union(*(g.axes - g.alike for g in guesses)) | more.pop("differs", NONE)
        grad = any(g.grad for g in guesses) and kind not in ("detached", "rounded")
        guess = Guess(axes, axes - differs, grad, any(g.data for g in guesses))
        return self.push(Op(kind, args, **more), guess)

    def varied(self, i: int, args: tuple[int, ...]) -> int:
        """The value itself, or its variation where it meets others that vary over more."""
        guess = self.values[i]
        lacking = NONE.union(*(self.values[j].axes for j in args)) - guess.axes
        if not guess.grad or not lacking:
            return i
        lacking = lacking if guess.data else lacking & {"tp"}
        if not lacking or not self.often(9 if guess.data else 4):
            return i
        return self.collective("pvary", i, tuple(sorted(lacking)))

    def collective(self, kind: str, i: int, axes: tuple[str, ...], *numbers: int) -> int:
        guess, over = self.values[i], frozenset(axes)
        same = replace(guess, axes=guess.axes - over, alike=guess.alike - over)
        differ = replace(guess, axes=guess.axes | over, alike=guess.alike - over)
        copies = replace(guess, axes=guess.axes | over, alike=guess.alike | over)
        after = {
            "psum": same,
            "pmax": replace(same, grad=False),
            "pvary": copies,
            "gather": same if numbers and numbers[-1] else copies,
        }
        return self.push(Op(kind, (i,), axes=axes, numbers=numbers), after.get(kind, differ))

    def leaf(self, name: str) -> int:
        cut = frozenset({"tp"} & set(self.axes)) if name in CUT else NONE
        return self.push(Op("leaf", leaf=name), Guess(cut, NONE, grad=name not in FROZEN))


SAME = ["pvary", "slice", "take"]
DIFFERS = ["psum", "psum", "psum", "gather", "gather", "scatter", "exchange", "permute", "pmax", "take"]


def communicate(d: Drawing) -> None:
    """A collective, more often one that fits what the value varies over."""
    i = d.value()
    guess = d.values[i]
    differs = guess.axes - guess.alike
    if d.often():
        choices = [(kind, axis) for axis in differs for kind in DIFFERS]
        choices += [(kind, axis) for axis in set(d.axes) - guess.axes for kind in SAME]
    else:
        choices = [(kind, axis) for axis in d.axes for kind in {*SAME, *DIFFERS}]
    if not choices:
        return
    kind, axis = d.draw(st.sampled_from(sorted(choices)))
    if kind in ("psum", "pmax", "pvary"):
        both = set(d.axes) <= (differs if kind != "pvary" else set(d.axes) - guess.axes) if d.often() else d.often(3)
        d.collective(kind, i, tuple(sorted(d.axes)) if both and len(d.axes) > 1 else (axis,))
    else:
        d.collective(kind, i, (axis,), d.number(), d.number() % 2)


UNARY = ["tanh", "sine", "detached", "rounded", "turned"]
BINARY = [
    "add",
    "add",
    "multiply",
    "multiply",
    "choose",
    "compare",
    "picked",
    "own",
    "written",
    "product_of_values",
    "joined",
]


def compute(d: Drawing) -> None:
    """An operation of torch."""
    group = d.draw(
        st.sampled_from(
            ["binary", "binary", "binary", "weight", "weight", "leaf", "leaf", "unary", "dims", "rank", "read"]
        )
    )
    if group == "unary":
        d.apply(d.pick(set(UNARY)), d.value())
    elif group == "binary":
        kind = d.draw(st.sampled_from(BINARY))
        d.apply(kind, d.value(), d.value(), numbers=(d.number(), d.number()))
    elif group == "dims":
        d.apply(d.pick({"mean", "peak", "part"}), d.value(), numbers=(d.number(), d.number() % 2))
    elif group == "rank":
        rank(d)
    elif group == "leaf":
        at = d.leaf(d.pick(LEAVES))
        if d.often(6):
            d.apply(d.pick({"add", "multiply"}), d.value(), at, numbers=(0, 0))
    elif group == "weight":
        weight(d)
    else:
        read(d)


def rank(d: Drawing) -> None:
    i, axis = d.value(), d.draw(st.sampled_from(d.axes))
    guess = d.values[i]
    if guess.grad and guess.data and axis not in guess.axes and d.often(8):
        i = d.collective("pvary", i, (axis,))
    over = frozenset({axis})
    kind = d.pick({"masked", "weighted_by_rank"})
    d.apply(kind, i, axes=(axis,), numbers=(d.number(), d.number() % 2), extra=over, differs=over)


def weight(d: Drawing) -> None:
    name, i = d.pick({"m", "up", "down"}), d.value()
    guess, tp = d.values[i], frozenset({"tp"} & set(d.axes)) if name != "m" else NONE
    if guess.grad and guess.data and tp - guess.axes and d.often(9):
        i = d.collective("pvary", i, ("tp",))
    guess = d.values[i]
    axes = guess.axes | tp
    d.push(Op("product", (i,), leaf=name), Guess(axes, guess.alike - tp, True, guess.data))


def read(d: Drawing) -> None:
    tp, data = frozenset({"tp"} & set(d.axes)), frozenset(d.axes) - {"tp"}
    kind = d.pick({"batch", "rows", "whole", "part"})
    if kind in ("batch", "rows"):
        d.push(Op(kind), Guess(data, NONE, False, True))
    elif kind == "whole":
        d.push(Op("look_up", leaf="t"), Guess(data, NONE, True, True))
    else:
        name = d.pick({"t", "v"} if d.often(2) else {"v"})
        at = d.push(Op("look_up_in_a_part", leaf=name), Guess(data | tp, NONE, True, True))
        if tp and d.often(8):
            d.collective("psum", at, ("tp",))


def step(d: Drawing) -> None:
    communicate(d) if d.often(3) else compute(d)


def finish(d: Drawing, keep: int) -> tuple[int, ...]:
    """Fold values that nobody used into the last, so that nothing is computed in vain; returns what the block returns."""
    unused = [i for i in range(len(d.values)) if i not in d.used]
    last = unused.pop() if unused else len(d.values) - 1
    returned = []
    while unused:
        i = unused.pop()
        if len(returned) + 1 < keep and d.often(4):
            returned.append(i)
        else:
            i = settled(d, i, d.values[last])
            last = d.apply("add", last, i)
    return (last, *returned)


def settled(d: Drawing, i: int, other: Guess) -> int:
    """A value summed over what another does not vary over."""
    extra = (d.values[i].axes - other.axes) & {"tp"}
    return summed(d, i) if extra and d.often(9) else i


def summed(d: Drawing, i: int) -> int:
    """A value summed over tp, after copies have been made to differ."""
    if "tp" in d.values[i].alike and d.often(9):
        i = d.apply("weighted_by_rank", i, axes=("tp",), extra=frozenset({"tp"}), differs=frozenset({"tp"}))
    return d.collective("psum", i, ("tp",))


def reads_of(d: Drawing, index: int, own: list[str]) -> tuple[tuple[str, str], ...]:
    """Where a block finds the leaves that its operations name: its own, or those of an earlier block."""
    found = []
    for name in sorted({op.leaf for op in d.ops if op.leaf}):
        path = f"b{index}.{name}"
        earlier = [p for p in own if p.endswith(f".{name}")]
        if earlier and not d.often(8):
            path = d.draw(st.sampled_from(earlier))
        own.append(path)
        found.append((name, path))
    return tuple(found)


def first_block(d: Drawing) -> None:
    """The batch times a whole weight, so that a cotangent flows into everything."""
    data = frozenset(d.axes) - {"tp"}
    at = d.push(Op("batch"), Guess(data, NONE, False, True))
    d.push(Op("product", (at,), leaf="m"), Guess(data, NONE, True, True))


def loss_block(d: Drawing) -> int:
    """The sum of all values, each made whole over tp and different over the data axes, most of the time."""
    terms = []
    for i in range(d.entered):
        at = d.apply("spread", i)
        guess = d.values[at]
        if "tp" in guess.axes and d.often(9):
            at = summed(d, at)
        lacking = frozenset(d.axes) - {"tp"} - d.values[at].axes
        if lacking and d.often(9):
            at = d.collective("pvary", at, tuple(sorted(lacking)))
        terms.append(at)
    if d.often(3):
        at = d.apply("spread", d.leaf(d.pick({"g", "s"})))
        terms.append(d.collective("psum", at, ("tp",)) if "tp" in d.values[at].axes and d.often(9) else at)
    total = terms[0]
    for at in terms[1:]:
        total = d.apply("add", total, at)
    return total


@st.composite
def programs(draw: st.DrawFn, axes: tuple[str, ...]) -> Program:
    """One to three layers of up to five operations each, and a loss; ``axes`` are those that have more than one rank."""
    own: list[str] = []
    blocks: list[Block] = []
    entering: list[Guess] = []
    layers = draw(st.integers(1, 3))
    for index in range(layers):
        d = Drawing(draw, axes, entering, entered=len(entering))
        if index == 0:
            first_block(d)
        for _ in range(draw(st.integers(1, 5))):
            step(d)
        returns = finish(d, keep=3)
        blocks.append(Block(tuple(d.ops), returns, reads_of(d, index, own)))
        entering = [d.values[i] for i in returns]
    d = Drawing(draw, axes, entering, entered=len(entering))
    total = loss_block(d)
    blocks.append(Block(tuple(d.ops), (total,), reads_of(d, layers, own)))
    return Program(tuple(blocks))
