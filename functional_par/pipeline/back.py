"""The backward of one call of a layer: whole, or the cotangents of its inputs now and gradients of its weights later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from torch import Tensor

from functional_par.capture import Accumulator, Capture, Pair, Ready
from functional_par.errors import ModelError
from functional_par.pipeline.products import Products
from functional_par.vjp import Pull


@dataclass(eq=False)
class Uses:
    """How a layer uses its leaves, found out by its first calls; it does the same at every call.

    Until the first backward has run it gets leaves that are watched. One into which no cotangent flows, though kernels have
    captured it, has no other use: what is differentiated is the same graph each time. From then on the leaves that have other
    uses are primals, which costs less than to watch them; those that have none are not, for theirs would be zeros.

    Attributes:
        hidden: the leaves with no other use, and by how many kernels they are captured; None until the first backward.
    """

    hidden: Mapping[str, int] | None = None

    def learn(self, capture: Capture) -> None:
        """After the backward of a call in which every leaf was watched."""
        self.hidden = {
            path: n
            for path, n in (capture.uses if self.hidden is None else self.hidden).items()
            if path not in capture.ordinary
        }

    def check(self, layer: str, capture: Capture) -> None:
        """ModelError if a leaf that is left out was captured less or more often than at first: its gradient would be lost."""
        for path, n in (self.hidden or {}).items():
            if capture.uses[path] != n:
                raise ModelError(
                    f"layer {layer!r} passed {path} to {capture.uses[path]} functions of fp.nn, but to {n} in its first call. "
                    "A layer does the same at every call: let it not depend on what changes from one call to the next."
                )


@dataclass(frozen=True, eq=False)
class Back:
    """The backward of one call. It runs once.

    Attributes:
        primals: the leaves whose gradients ``pull`` gives first; the cotangents of ``inputs`` inputs come next.
        shared: the leaves that other layers read too.
        capture: what the call has captured.
        learning: what to tell how the layer uses its leaves, in a call that watched them.
    """

    primals: tuple[str, ...]
    inputs: int
    shared: frozenset[str]
    pull: Pull
    capture: Capture
    learning: Uses | None

    def held(self) -> Iterator[Tensor]:
        """What it keeps alive beside the graph of its layer."""
        return iter(())

    def __call__(self, cotangents: Sequence[Tensor], gradients: Accumulator, later: list[Pair] | None) -> list[Tensor]:
        """Cotangents of the differentiable inputs, from one for each differentiable output.

        Args:
            cotangents: one for each differentiable output.
            gradients: what the gradients of the layer's leaves are added to.
            later: None adds all of them; a list gets those that can wait, in the order in which they are to be added. Either
                way all parts of a leaf's gradient are added in the same order, so that it has the same bits.
        """
        with self.capture.backward(gradients, later):
            result = self.pull(cotangents)
        n, ordinary = len(self.primals), self.capture.ordinary
        found = dict(zip(self.primals, result[:n], strict=True))
        if self.learning is not None:
            self.learning.learn(self.capture)
            found = {path: ordinary[path] for path in self.capture.raw if path in ordinary}
        if later is not None:  # a part of a leaf's gradient keeps its place among those that come later
            waiting = [path for path in found if path in self.shared or self.capture.uses[path]]
            later += [Ready(path, found.pop(path)) for path in waiting]
        gradients.add(found)
        return list(result[n : n + self.inputs])


@dataclass(frozen=True, eq=False)
class Again:
    """The backward of a call whose layer runs again first. It runs once, and is called as a ``Back`` is.

    Attributes:
        inputs: of the call; what is not kept of them has a stand-in.
        kept: places of those that are kept.
        run: the layer on these inputs, to its outputs and the backward of that run.
        products: results of the first run that the second one takes over; None computes all again.
    """

    inputs: tuple[Tensor, ...]
    kept: frozenset[int]
    run: Callable[[Sequence[Tensor]], tuple[list[Tensor], Back]]
    products: Products | None

    def __call__(self, cotangents: Sequence[Tensor], gradients: Accumulator, later: list[Pair] | None) -> list[Tensor]:
        with nullcontext() if self.products is None else self.products.replaying():
            back = self.run(self.inputs)[1]
        return back(cotangents, gradients, later)

    def held(self) -> Iterator[Tensor]:
        """What it keeps alive."""
        yield from (self.inputs[i] for i in self.kept)
        yield from () if self.products is None else (product.result for product in self.products.kept)


Backward = Back | Again
