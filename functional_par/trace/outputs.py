"""What a layer and the loss may return: tensors between layers, a pair (sum, count) at the end."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from functional_par.errors import MissingCollective, ModelError, SuperfluousCollective
from functional_par.model import LOSS, Layer
from functional_par.trace.place import Place
from functional_par.trace.values import Abstract, Axes, Source, Use, names, order, quoted


def location(layer: Layer) -> str:
    """The layer and the line on which its function is defined."""
    place = Place.of_function(layer.fn)
    return f"layer {layer.name!r}, {place}" if place else f"layer {layer.name!r}"


def check_output(layer: Layer, output: Any) -> Any:
    """The output itself, if it is one that the next layer can get.

    Raises:
        ModelError: anything but tensors between layers; a loss that is not a pair (sum, count).
    """
    if layer.name == LOSS:
        _check_pair(layer, output)
        return output
    for leaf in pytree.tree_leaves(output):
        if not isinstance(leaf, Tensor):
            raise ModelError(
                f"{location(layer)}: it returns {leaf!r} of type {type(leaf).__name__}. What goes from layer to layer is a "
                "tensor, or a dict, list or tuple of tensors, since it may go to another rank; a fixed Python value can "
                "live in the layers' closure."
            )
    return output


def _check_pair(layer: Layer, output: Any) -> None:
    pair = isinstance(output, tuple) and len(output) == 2
    total, count = output if pair else (None, None)
    if not isinstance(total, Tensor) or total.shape != () or not total.is_floating_point():
        raise ModelError(
            f"{location(layer)}: the loss returns a pair (sum, count) whose sum is a float tensor without dims."
        )
    if not isinstance(count, int) and not (isinstance(count, Tensor) and count.shape == () and not count.is_complex()):
        shown = f"a tensor of shape {list(count.shape)}" if isinstance(count, Tensor) else repr(count)
        raise ModelError(
            f"{location(layer)}: the loss returns a pair (sum, count) whose count is an integer or a tensor without dims, "
            f"not {shown}."
        )


def check_loss(layer: Layer, output: Any, data: Axes) -> tuple[Use, ...]:
    """The sum must be the same along every axis but the data axes, along which the step adds up what each rank returns.

    Returns:
        The leaves that the loss is a function of without the batch: here they meet the sum over the data axes.

    Raises:
        ModelError: it depends on no trainable parameter.
        MissingCollective: it, or the count, differs along another axis.
        SuperfluousCollective: it is already the same along a data axis.
    """
    total, count = output
    value = total.value
    if not value.grad:
        raise ModelError(f"{location(layer)}: the loss does not depend on any trainable parameter.")
    if extra := order(value.axes - data):
        raise MissingCollective(
            f"{location(layer)}: the loss differs along {names(extra)}: every rank would train on a loss of its own. "
            f"Sum its parts with par.psum(x, {quoted(extra)}), in the loss or in the layer before; logits that are cut over "
            "the vocabulary go through fp.nn.cross_entropy."
        )
    summed = data - value.axes
    if same := order(summed & value.closed if value.sources else summed):
        raise SuperfluousCollective(
            f"{location(layer)}: the loss is the same on every rank of {names(same)}, but the step adds up the losses of "
            f"these ranks, each of its own rows; it would be {' * '.join(same)} times too large. Leave par.psum over "
            f"{names(same)} out of the loss."
        )
    if isinstance(count, Abstract) and (extra := order(count.value.axes - data)):
        raise MissingCollective(
            f"{location(layer)}: the count differs along {names(extra)}. Count the terms of the whole loss, with "
            f"par.psum(count, {quoted(extra)}) if this rank has but a part of them."
        )
    place = Place.of_function(layer.fn) or Place("", 0)
    return tuple(Use(Source(s.path, s.owed | summed), layer.name, place) for s in value.sources)
