"""Calls a layer function while its operations are followed, and tells whatever goes wrong with the layer and the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from functional_par.errors import ModelError, ParallelError
from functional_par.model import Layer
from functional_par.par import TensorParallelMode
from functional_par.trace.follow import Typing
from functional_par.trace.literals import Literals
from functional_par.trace.outputs import location
from functional_par.trace.place import Place
from functional_par.trace.setting import Setting


def follow_call(layer: Layer, typing: Typing, setting: Setting, function: Callable[[], Any]) -> Any:
    """Call a function of no arguments. Derivatives are on, as they are when the layer runs.

    Raises:
        ParallelError: what the function raised, told with the layer and the line. A refusal that the function caught, or
            that TorchScript turned into an error of its own, is raised all the same.
    """
    try:
        with torch.enable_grad(), torch.device("meta"), typing, Literals(typing):
            result = function()
    except Exception as error:
        raise _told(layer, setting, typing.refusal or error) from error
    if typing.refusal:
        raise _told(layer, setting, typing.refusal)
    return result


def _told(layer: Layer, setting: Setting, error: Exception) -> ParallelError:
    """The error with the layer and the line."""
    if isinstance(error, ParallelError):
        known = str(error).startswith("layer ")
        return error if known else type(error)(f"{_place(layer, error)}: {error}")
    place = Place.of_exception(error) or Place.of_function(layer.fn)
    return ModelError(
        f"layer {layer.name!r} failed while it was traced, at {place}: {type(error).__name__}: {error}."
        f"{_hint(error, setting)}"
    )


def _hint(error: Exception, setting: Setting) -> str:
    if "nonzero" in str(error):
        return " A shape must not depend on the values of a tensor: use torch.where with the mask instead of indexing with it."
    if any(sign in str(error) for sign in _UNKNOWN) and "aten::equal" not in str(error):
        return (
            " The trace follows operations of torch on tensors without data, which this one does not take. Write it in other"
            " operations: torch.where for a choice, a Python loop of fixed length, or par.kernel(definition, fast) with a"
            " definition in plain operations."
        )
    if any(sign in str(error) for sign in _NUMBERS):
        return (
            " The function runs on tensors without data, so it must not turn a tensor into a Python number or branch on one;"
            " use torch.where."
        )
    if isinstance(error, KeyError):
        return (
            f" The batch is described with the fields {', '.join(setting.batch)}; describe others with fp.Model(..., "
            "batch={name: fp.Input(shape, dtype)})."
        )
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SHAPES):
        return _sizes(setting)
    return ""


def _sizes(setting: Setting) -> str:
    """The sizes that a layer met, which its author may not have written anywhere."""
    fields = ", ".join(f"{name} {list(shape)}" for name, (shape, _) in setting.batch.items())
    text = (
        f" It was traced with {fields}; sizes that the model leaves open are made up, so where a parameter fixes one, say so:"
        " fp.Model(..., batch={name: fp.Input((None, 128)), ...})."
    )
    if (tp := setting.sizes["tp"]) == 1:
        return text
    text += f" With tp={tp} a rank holds its part of every dim that shard_tp cuts"
    if setting.mode is not TensorParallelMode.REDUCE_SCATTER:
        return text + "."
    return text + (
        f", and in REDUCE_SCATTER 1/{tp} of the sequence between layers: fp.nn.column_linear gathers it, fp.nn.row_linear and"
        " fp.nn.embedding leave it cut, fp.nn.sequence_window cuts what is whole."
    )


_SHAPES = ("shape", "size", "dimension", "broadcast")
"""By these words torch says that sizes do not fit."""

_UNKNOWN = ("HigherOrderOperator", "no fake impl", "storage_device.is_cpu()", "on meta device")
"""By these words torch says that it cannot compute without data."""

_NUMBERS = (
    "meta tensors",
    "meta device type",
    "device type meta",
    "unallocated storage",
    "aten::equal",
    "Meta tensors",
    "'Meta' backend",
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "to a scalar",
)
"""By these words torch says that a number was asked for, which is not there."""


def _place(layer: Layer, error: BaseException) -> str:
    place = Place.of_exception(error)
    return f"layer {layer.name!r}, {place}" if place else location(layer)
