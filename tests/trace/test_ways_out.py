"""Ways by which a value might leave the trace and come back as another: each is followed, or refused with what to write."""

from __future__ import annotations

import copy
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from einops.layers.torch import Rearrange
from torch.utils.checkpoint import checkpoint

import functional_par as fp
from functional_par.errors import MissingCollective, ModelError
from tests.trace.harness import judge, model_of, param, program_of
from tests.trace.programs import MLP, up

FOLLOWED = {}
"""Name to a function of two tensors, which the trace has to see as one of both."""


def followed(fn):
    FOLLOWED[fn.__name__] = fn
    return fn


class OldStyle(torch.autograd.Function):
    """A Function whose forward takes the context."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, ct):
        a, b = ctx.saved_tensors
        return ct * b, ct * a


class InPlace(torch.autograd.Function):
    """A Function that modifies its argument."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.mark_dirty(a)
        return a.add_(b)

    @staticmethod
    def backward(ctx, ct):
        return ct, ct


@torch.library.custom_op("functional_par_test::product", mutates_args=())
def library_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * b


@library_product.register_fake
def _(a, b):
    return torch.empty_like(a)


library_product.register_autograd(
    lambda ctx, ct: (ct * ctx.saved_tensors[1], ct * ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("functional_par_test::add_", mutates_args={"a"})
def library_add(a: torch.Tensor, b: torch.Tensor) -> None:
    a.add_(b)


@library_add.register_fake
def _(a, b):
    return None


@torch.library.custom_op("functional_par_test::opaque", mutates_args=())
def library_opaque(a: torch.Tensor) -> torch.Tensor:
    return a * 2


@followed
def a_function_of_the_old_style(a, b):
    return OldStyle.apply(a, b)


@followed
def a_function_that_modifies_its_argument(a, b):
    return InPlace.apply(a * 1.0, b)


@followed
def an_operation_of_torch_library(a, b):
    return library_product(a, b)


@followed
def an_operation_of_torch_library_that_writes(a, b):
    out = torch.zeros_like(a)
    library_add(out, b.detach())
    return a * out


@followed
def a_checkpoint(a, b):
    return checkpoint(lambda a, b: a * b, a, b, use_reentrant=False)


@followed
def a_compiled_function(a, b):
    return torch.compile(lambda a, b: a * b, backend="eager")(a, b)


@followed
def functionalize(a, b):
    return torch.func.functionalize(lambda a, b: a * b)(a, b)


@followed
def a_derivative_inside(a, b):
    return torch.func.grad(lambda a: (a.tanh() * b).sum())(a)


@followed
def vmap(a, b):
    return torch.func.vmap(torch.mul)(a, b)


@followed
def einops_layers(a, b):
    return a * Rearrange("b s e -> b e s")(b)


@followed
def another_dtype_and_back(a, b):
    return a * b.to(torch.float16).to(torch.int64).to(a.dtype)


@followed
def the_bits_of_a_number(a, b):
    return a * b.double().view(torch.int64).to(a.dtype)


@followed
def complex_numbers(a, b):
    return (a * torch.view_as_complex(torch.stack([b, b], -1))).real


@followed
def one_hot(a, b):
    return a * F.one_hot(b.argmax(-1), 6)


@followed
def strides(a, b):
    return a * torch.as_strided(b, (6,), (1,))


@followed
def a_tensor_as_a_fill_value(a, b):
    return a * torch.zeros_like(a).masked_fill(a > 0, b.detach().sum()).fill_(b.detach().sum())


@followed
def the_ends_of_a_range(a, b):
    return a * torch.linspace(b.detach().sum(), 1.0, 6)


@followed
def the_host_and_back(a, b):
    return a * b.detach().cpu().to(a.device) * torch.tensor(b.detach().sum(), device="cpu")


@followed
def a_deep_copy(a, b):
    return a * copy.deepcopy(b.detach())


@followed
def a_buffer_of_a_module(a, b):
    module = torch.nn.Module()
    module.register_buffer("b", b.detach())
    return a * module.b


@followed
def the_grad_attribute(a, b):
    y = a.detach() * 1.0
    y.grad = b.detach()
    return a * y.grad


@followed
def inference_mode(a, b):
    with torch.inference_mode():
        y = b * 2
    return a * y.clone()


@followed
def a_view_made_in_a_thread(a, b):
    return a * elsewhere(lambda: b.detach().view(-1)).sum()


@followed
def rows_one_by_one(a, b):
    return torch.stack([x * y for x, y in zip(a, b, strict=True)])


def elsewhere(fn):
    """The result of a function that runs in another thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(fn()))
    thread.start()
    thread.join()
    return found[0]


def layer_of(fn, vary):
    """The function of a whole activation and partial sums; right if the former is varied."""

    def layer(p, x, par):
        part = up(p, x, par) @ p["down"].T
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y = fn(par.pvary(x, "tp") if vary else x, part)
        return x + par.psum(y, "tp")

    return layer


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_value_is_followed_through(name):
    program_of(model_of(layer_of(FOLLOWED[name], vary=True), MLP))
    with pytest.raises(MissingCollective, match="an activation that is the same on every rank of tp meets values"):
        program_of(model_of(layer_of(FOLLOWED[name], vary=False), MLP))


EXACT = [
    "a_function_of_the_old_style",
    "an_operation_of_torch_library",
    "a_derivative_inside",
    "strides",
    "einops_layers",
]


@pytest.mark.parametrize("name", EXACT)
def test_what_was_followed_is_right(name):
    engine = "tape" if name in ("a_function_of_the_old_style", "an_operation_of_torch_library") else "func"
    judge(model_of(layer_of(FOLLOWED[name], vary=True), MLP), fp.Mesh(tp=2), rows=1, engine=engine).check()


HOOKS = {}


def hook(fn):
    HOOKS[fn.__name__] = fn
    return fn


@hook
def on_a_tensor(y, s):
    y.register_hook(lambda ct: ct * s)
    return y


@hook
def on_a_node(y, s):
    y.grad_fn.register_hook(lambda before, after: tuple(None if ct is None else ct * s for ct in before))
    return y


@hook
def before_a_node(y, s):
    y.grad_fn.register_prehook(lambda cts: tuple(None if ct is None else ct * s for ct in cts))
    return y


@hook
def on_what_is_saved(y, s):
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x * s):
        return y * y


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("of", ["activation", "leaf"])
def test_a_hook_that_brings_in_what_differs_is_refused(name, of):
    def layer(p, x, par):
        s = (up(p, x, par) @ p["down"].T).sum().detach()
        return HOOKS[name](x * 2, s) if of == "activation" else x * HOOKS[name](p["g"] * 2, s)

    given = "the activation that enters the layer" if of == "activation" else r"body\.g"
    with pytest.raises(MissingCollective, match=rf"gives {given} a cotangent that differs along tp"):
        program_of(model_of(layer, {"g": param(6), **MLP}))


NUMBER = "must not turn a tensor into a Python number"
OTHER = r"Write it in other operations: torch\.where .* par\.kernel\(definition, fast\)"
UNSEEN = "made where the trace does not see it"

REFUSED = {
    "numpy": (NUMBER, lambda a, b: a * torch.from_numpy(b.detach().numpy())),
    "asarray": (NUMBER, lambda a, b: a * torch.as_tensor(np.asarray(b.detach()))),
    "dlpack": (NUMBER, lambda a, b: a * torch.from_dlpack(b.detach())),
    "tolist": (NUMBER, lambda a, b: a * torch.tensor(b.detach().tolist())),
    "item": (NUMBER, lambda a, b: a * b.sum().item()),
    "full_like": (NUMBER, lambda a, b: a * torch.full_like(a, b.detach().sum())),
    "equal": (NUMBER, lambda a, b: a if torch.equal(a, b) else b),
    "bool": (NUMBER, lambda a, b: a if (b > 0).all() else b),
    "sparse": (OTHER, lambda a, b: a * b.detach()[0].to_sparse().to_dense()),
    "cond": (OTHER, lambda a, b: torch.cond(b.sum() > 0, lambda a: a * 2, lambda a: a * 3, (a,))),
    "opaque": (OTHER, lambda a, b: a * library_opaque(b.detach())),
    "nested": (OTHER, lambda a, b: a * torch.nested.nested_tensor([b.detach()[0]]).to_padded_tensor(0.0)),
    "thread": (UNSEEN, lambda a, b: a * elsewhere(lambda: b.detach() * 2)),
    "module": ("torch.func.functional_call", lambda a, b: torch.nn.LayerNorm(6)(a * b)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_way_out_is_refused_with_what_to_write_instead(name):
    words, fn = REFUSED[name]
    with pytest.raises(ModelError, match=rf"layer 'body'.*{words}"):
        program_of(model_of(layer_of(fn, vary=True), MLP))


def test_a_function_that_torchscript_runs_is_followed():
    def product(a, b):
        return a * b

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it
        scripted = torch.jit.trace(product, (torch.ones(2), torch.ones(2)))
    program_of(model_of(layer_of(scripted, vary=True), MLP))
    with pytest.raises(MissingCollective, match=r"layer 'body', trace/test_ways_out.*par\.pvary\(\.\.\., 'tp'\)"):
        program_of(model_of(layer_of(scripted, vary=False), MLP))


def caught(wrong):
    """A layer that tries what is wrong and goes on without it."""

    def layer(p, x, par):
        try:
            return x + wrong(x, up(p, x, par) @ p["down"].T, par)
        except Exception:
            return x

    return layer


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x, part, par: par.psum(x * part, "tp"), "an activation that is the same on every rank of tp"),
        (lambda x, part, par: par.psum(x, "tp"), "par.psum over tp of a value that is already the same"),
        (lambda x, part, par: x * torch.rand(6), "draws from torch's global generator"),
    ],
)
def test_a_refusal_that_the_layer_catches_is_a_refusal(wrong, message):
    with pytest.raises(fp.ParallelError, match=rf"layer 'body', trace/test_ways_out\.py:\d+.*{message}"):
        program_of(model_of(caught(wrong), MLP))
