"""Sees what no dispatch shows: the tensors that a layer makes out of Python numbers, and torch's attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from functional_par.errors import ModelError
from functional_par.trace.follow import Typing


class Literals(TorchFunctionMode):
    """Tells a ``Typing`` of the tensors that are made out of Python numbers."""

    def __init__(self, typing: Typing) -> None:
        super().__init__()
        self.typing = typing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__reduce_ex__:
            raise ModelError(f"{self.typing.where()}: a tensor is copied or pickled as a Python object. Use x.clone().")
        self.typing.products.attending = func is F.scaled_dot_product_attention
        out = func(*args, **(kwargs or {}))
        self.typing.products.attending = False
        if func in _FROM_NUMBERS and isinstance(out, Tensor):
            given = args[1:] if func is torch.Tensor.new_tensor else args
            self.typing.literal(out, [x for x in pytree.tree_leaves((given, kwargs)) if isinstance(x, Tensor)])
        return out


_FROM_NUMBERS = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
