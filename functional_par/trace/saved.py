"""How much a layer keeps for its backward, read off the graph that its forward has left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor


def saved_bytes(outputs: Iterable[Tensor], apart: Iterable[Tensor] = ()) -> int:
    """Bytes of the memory that the backwards of these tensors keep alive, each storage once.

    What a hook of the layer's own keeps in another form (``torch.utils.checkpoint``), and what an ``autograd.Function`` sets on
    its context without ``save_for_backward``, is not seen.

    Args:
        outputs: tensors with a graph, on any device.
        apart: tensors whose memory is not counted, such as the parameters, which are there anyway.
    """
    outputs = list(outputs)
    devices = {x.device for x in outputs}
    known = {_storage(x) for x in apart}
    total = 0
    for x in _saved(outputs):
        # Python's numbers are saved too, as tensors of the CPU: next to those of another device they are told apart.
        if (storage := _storage(x)) not in known and x.device in devices:
            known.add(storage)
            total += x.untyped_storage().nbytes()
    return total


def _saved(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Every tensor that a node of the graph has saved."""
    waiting = [x.grad_fn for x in outputs if x.grad_fn is not None]
    seen = set(waiting)
    kinds: dict[type, tuple[str, ...]] = {}
    while waiting:
        node: Any = waiting.pop()
        if type(node) not in kinds:
            kinds[type(node)] = tuple(name for name in dir(node) if name.startswith("_raw_saved_"))
        for name in kinds[type(node)]:
            yield from _tensors(getattr(node, name))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def _tensors(saved: Any) -> Iterator[Tensor]:
    """What is in one variable of a node, which may be a list, without running the hooks that would bring it back."""
    if isinstance(saved, (list, tuple)):
        for each in saved:
            yield from _tensors(each)
    elif saved is not None and isinstance(data := saved.data, Tensor):
        yield data


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
