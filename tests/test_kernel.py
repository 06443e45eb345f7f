"""A ``Kernel`` is a ``torch.autograd.Function``, under whatever it is called."""

from __future__ import annotations

import pytest
import torch

from functional_par.kernel import Kernel

DTYPE = torch.float64


def scaled(base):
    """``w x^2`` and a number that is not differentiated, as a Function of that base."""

    class Scaled(base):
        @staticmethod
        def forward(x, w, power):
            calls.append(torch._C._functorch.peek_interpreter_stack() is None)
            return w * x**power, x.sum()

        @staticmethod
        def setup_context(ctx, inputs, output):
            x, w, ctx.power = inputs
            ctx.mark_non_differentiable(output[1])
            ctx.save_for_backward(x, w)

        @staticmethod
        def backward(ctx, ct, _):
            x, w = ctx.saved_tensors
            gx = ct * w * ctx.power * x ** (ctx.power - 1) if ctx.needs_input_grad[0] else None
            return gx, ct * x**ctx.power if ctx.needs_input_grad[1] else None, None

        @staticmethod
        def jvp(ctx, dx, dw, _):
            return dx + 2 * dw, None

        @staticmethod
        def vmap(info, in_dims, x, w, power):
            assert in_dims == (0, None, None)
            return apply(x, w, power), (0, None)

    calls, apply = [], Scaled.apply
    return lambda x, w: apply(x, w, 3)[0], calls


@pytest.fixture
def both():
    torch.manual_seed(0)
    x, w, ct = (torch.randn(3, 4, dtype=DTYPE) for _ in range(3))
    return scaled(Kernel)[0], scaled(torch.autograd.Function)[0], x, w, ct


def vjp(f, x, w, ct):
    y, pull = torch.func.vjp(f, x, w)
    return y, *pull(ct)


def chained(f):
    return lambda x, w: f(f(x, w).sin(), w)


def of_one(f, x, w, ct):
    return torch.func.vjp(lambda x: f(x, w), x)[1](ct)


def of_the_other(f, x, w, ct):
    return torch.func.vjp(lambda w: f(x, w), w)[1](ct)


def second(f, x, w, ct):
    return torch.func.grad(lambda x: (torch.func.grad(lambda w: (f(x, w) * ct).sum())(w) ** 2).sum())(x)


def by_autograd(f, x, w, ct):
    a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
    first = torch.autograd.grad(f(a, b), (a, b), ct, create_graph=True)
    return first + torch.autograd.grad(sum((g**2).sum() for g in first), (a, b))


def around_autograd(f, x, w, ct):
    """What is differentiated below the transform too."""
    b = w.clone().requires_grad_()
    y, pull = torch.func.vjp(lambda x: f(x, b), x)
    return torch.autograd.grad((pull(ct)[0] * ct).sum() + y.sum(), b)


def batched(f, x, w, ct):
    return torch.func.vmap(lambda row: f(row, w[0]))(x), torch.func.vjp(torch.func.vmap(lambda r: f(r, w[0])), x)[1](ct)


def in_vmap(f, x, w, ct):
    return torch.func.vmap(torch.func.grad(lambda row: f(row, w[0]).sum()))(x)


def forward_mode(f, x, w, ct):
    return torch.func.jvp(lambda w: torch.func.vjp(lambda x: f(x, w), x)[0], (w,), (ct,))


def dead(f, x, w, ct):
    """A value of a transform that has ended."""
    kept = []
    torch.func.vjp(lambda x: kept.append(x * 2) or x, x)
    return f(kept[0], w)


def dead_inside(f, x, w, ct):
    """The same, in another transform."""
    kept = []
    torch.func.vjp(lambda x: kept.append(x * 2) or x, x)
    return vjp(lambda x, w: f(x * 1, w) + f(w, torch.zeros_like(x)), x, w, ct), torch.func.vjp(
        lambda w: f(w, w), kept[0]
    )[0]


def without(f, x, w, ct):
    with torch.no_grad():
        return vjp(f, x, w, ct), f(x, w)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own, by jvp
@pytest.mark.parametrize(
    "use",
    [
        vjp,
        of_one,
        of_the_other,
        second,
        by_autograd,
        around_autograd,
        batched,
        in_vmap,
        forward_mode,
        dead,
        dead_inside,
        without,
    ],
)
@pytest.mark.parametrize("twice", [False, True])
def test_a_kernel_gives_what_a_function_gives(both, use, twice):
    kernel, function, x, w, ct = both
    if twice:
        kernel, function = chained(kernel), chained(function)
    got, expected = (torch.utils._pytree.tree_leaves(use(f, x, w, ct)) for f in (kernel, function))
    assert len(got) == len(expected) > 0
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
        assert a.requires_grad == b.requires_grad


def test_under_one_vjp_forward_runs_below_it_once():
    f, calls = scaled(Kernel)
    x = torch.ones(2, dtype=DTYPE)
    torch.func.vjp(f, x, x)
    assert calls == [True]
    assert torch._C._functorch.peek_interpreter_stack() is None


def test_an_error_in_forward_leaves_the_transforms_as_they_were():
    class Wrong(Kernel):
        @staticmethod
        def forward(x):
            raise ZeroDivisionError

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

    def f(x):
        level = torch._C._functorch.peek_interpreter_stack().level()
        with pytest.raises(ZeroDivisionError):
            Wrong.apply(x)
        assert torch._C._functorch.peek_interpreter_stack().level() == level
        assert not torch._C._functorch.get_single_level_autograd_function_allowed()
        return x * 2

    x = torch.ones(2, dtype=DTYPE)
    y, pull = torch.func.vjp(f, x)
    assert torch.equal(pull(y)[0], 2 * y)
