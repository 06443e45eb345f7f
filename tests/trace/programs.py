"""Layers as users might write them, each a correct program over tp (and dp): the trace has to accept it, and the gradients
have to be the plain function's."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import einops
import torch
import torch.nn.functional as F

import functional_par as fp
from tests.trace.harness import column, param, row

RIGHT: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {}
"""Name of a layer to its parameters and its function."""


def right(**params: Any) -> Callable[..., Any]:
    def note(fn: Callable[..., Any]) -> Callable[..., Any]:
        RIGHT[fn.__name__] = params, fn
        return fn

    return note


def up(p, x, par):
    return par.pvary(x, "tp") @ p["up"].T


def down(p, h, par):
    return par.psum(h @ p["down"].T, "tp")


MLP = {"up": column(), "down": row()}


# Buffers, views and indices


@right(**MLP)
def writes_into_a_buffer(p, x, par):
    h = up(p, x, par)
    out = torch.zeros_like(h)
    out[:, :2] = h[:, :2] * 3
    out[:, 2:] = h[:, 2:]
    return down(p, out, par)


@right(**MLP)
def writes_through_a_view_of_a_buffer(p, x, par):
    h = up(p, x, par)
    out = torch.zeros_like(h)
    first = out[:, :2]
    first.copy_(h[:, :2])
    first.mul_(2.0)
    return down(p, out + h, par)


@right(**MLP)
def adds_in_place_to_a_fresh_result(p, x, par):
    h = up(p, x, par)
    h += 1.0
    y = down(p, h.tanh_(), par)
    y = y * 2
    y += x
    return y


@right(**MLP)
def changes_memory_behind_the_derivative(p, x, par):
    y = x * 1.0
    y.detach().mul_(2.0)
    return y + down(p, up(p, y, par), par)


@right(**MLP)
def views_chunks_and_masks(p, x, par):
    h = up(p, x, par)
    a, b = h.chunk(2, 1)
    h = torch.cat([b.expand_as(b), a.narrow(1, 0, 3).contiguous()], 1)
    h = h.unfold(1, 1, 1).squeeze(-1).roll(1, 1).flip(1).masked_fill(h > 1, 0.5)
    return down(p, torch.where(h > 0, h, h * 0.1), par)


@right(**MLP)
def sorts_and_gathers_along_the_sequence(p, x, par):
    h = up(p, x, par)
    values, order = h.sort(1)
    top, at = h.topk(2, 1)
    return down(p, values.cumsum(1) + h.gather(1, order) + h.gather(1, at).sum(1, keepdim=True) * top[:, :1], par)


@right(g=param(12), t=param(5, 6), **MLP)
def looks_up_by_ids(p, x, par):
    ids = par.batch["ids"]
    x = x * p["g"][ids].unsqueeze(-1) + F.embedding(ids, p["t"])
    out = torch.zeros_like(x).scatter_add(1, ids.unsqueeze(-1).expand_as(x), x)
    return out.index_add(1, torch.tensor([0, 2]), x[:, :2])


@right(g=param(6))
def writes_at_indices(p, x, par):
    out = torch.zeros_like(x)
    out.index_put_((torch.arange(len(x))[:, None], par.batch["ids"]), x * p["g"], accumulate=True)
    return out.scatter_reduce(1, par.batch["ids"].unsqueeze(-1).expand_as(x), x, "sum")


@right(g=param(6), h=param(6), c=param(6, 6))
def normalises(p, x, par):
    y = F.layer_norm(x @ p["c"], (6,), p["g"], p["h"])
    y = F.group_norm(y.transpose(1, 2), 2, p["g"], p["h"]).transpose(1, 2)
    variance, mean = torch.var_mean(y, -1, keepdim=True)
    return (y - mean) * (variance + 1).rsqrt()


@right(**MLP)
def makes_a_loss_inside(p, x, par):
    logits = down(p, up(p, x, par), par)
    losses = F.cross_entropy(logits.flatten(0, 1), par.batch["ids"].flatten(), reduction="none")
    return x * losses.view(*x.shape[:2], 1)


@right(**MLP)
def is_written_with_einops(p, x, par):
    h = einops.einsum(par.pvary(x, "tp"), p["up"], "b s e, f e -> b s f")
    h = einops.repeat(einops.rearrange(h, "b s f -> s b f"), "s b f -> s b f k", k=2)
    h = einops.reduce(h, "s b f k -> b s f", "mean")
    return par.psum(torch.einsum("bsf,ef->bse", h, p["down"]), "tp")


@right(**MLP)
def is_complex(p, x, par):
    h = up(p, x, par)
    z = torch.complex(h, 2 * h) * torch.view_as_complex(torch.stack([h, h], -1))
    return down(p, z.real + z.imag + z.abs(), par) + torch.fft.irfft(torch.fft.rfft(x, dim=1), n=x.shape[1], dim=1)


@right(**MLP)
def convolves_and_uses_lists_of_tensors(p, x, par):
    h = F.conv1d(par.pvary(x, "tp").transpose(1, 2), p["up"].unsqueeze(-1)).transpose(1, 2)
    a, b = torch._foreach_mul([h, h], 2.0)
    return down(p, a + b, par)


@right(g=param(6, 6))
def decomposes_a_matrix(p, x, par):
    s = p["g"] @ p["g"].T + 8 * torch.eye(6, dtype=x.dtype)
    q, r = torch.linalg.qr(s)
    return x @ torch.linalg.solve(s, torch.linalg.cholesky(s)) + torch.linalg.slogdet(s)[1] + (q @ r).sum()


@right(g=param(6))
def goes_through_integers(p, x, par):
    return x * (x * 10).to(torch.int64) * p["g"] + (x.argmax(-1, keepdim=True) > 2)


@right(g=param(6))
def makes_tensors_of_numbers(p, x, par):
    ones = [1.0] * 6
    x = x * torch.tensor([1.0, 2, 3, 4, 5, 6], dtype=x.dtype) * torch.as_tensor(2.0) * p["g"]
    return x + x.new_tensor(ones) + torch.asarray(ones) + torch.arange(6) + CLOSED.to(x.dtype)


CLOSED = torch.linspace(0.0, 1.0, 6, dtype=torch.float64)


@lru_cache
def table(n, device, dtype):
    return torch.arange(n, device=device, dtype=dtype)


@right(g=param(6))
def keeps_constants_in_a_cache(p, x, par):
    return x * p["g"] * table(6, x.device, x.dtype)


# Parameters and what is computed from them


@right(g=param(6), **MLP)
def adds_a_row_bias_after_the_sum(p, x, par):
    return down(p, up(p, x, par), par) + p["g"]


@right(g=param(6), **MLP)
def adds_a_part_of_the_row_bias_before_the_sum(p, x, par):
    return par.psum(up(p, x, par) @ p["down"].T + p["g"] / par.size("tp"), "tp")


@right(g=param(6), **MLP)
def scales_partial_sums(p, x, par):
    return par.psum(up(p, x, par) @ p["down"].T * p["g"], "tp")


@right(g=param(6), **MLP)
def scales_partial_and_whole_with_one_leaf(p, x, par):
    return par.psum(up(p, x, par) @ p["down"].T * par.pvary(p["g"], "tp"), "tp") + p["g"]


@right(g=param(6, 6), **MLP)
def routes(p, x, par):
    gate = (x @ p["g"]).softmax(-1)[..., :1]
    return par.psum(par.pvary(gate, "tp") * (up(p, x, par) @ p["down"].T), "tp")


@right(**MLP)
def normalises_a_split_weight(p, x, par):
    norm = par.psum(p["up"].square().sum(), "tp").sqrt()
    return down(p, par.pvary(x, "tp") @ (p["up"] / par.pvary(norm, "tp")).T, par)


@right(w=param(6, 6), s=param(6, dims="ffn"), down=row())
def slices_a_whole_weight(p, x, par):
    return down(p, par.pvary(x, "tp") @ (par.slice(p["w"], "tp", 0) * p["s"].unsqueeze(-1)).T, par)


@right(w=param(6, 6), s=param(6, dims="ffn"), down=row())
def slices_a_weight_that_it_also_reads_whole(p, x, par):
    return down(p, par.pvary(x, "tp") @ (par.slice(p["w"], "tp", 0) * p["s"].unsqueeze(-1)).T, par) + x @ p["w"]


@right(w=param(6, 6), down=row())
def takes_windows_of_a_whole_weight(p, x, par):
    n = 6 // par.size("tp")
    return down(p, par.pvary(x, "tp") @ par.take(p["w"], "tp", 0, tuple(range(0, 6, n)), n).T, par)


@right(**MLP)
def gathers_a_weight_for_whole_use(p, x, par):
    return x @ par.all_gather(p["up"], "tp", 0, to="replicated").T + down(p, up(p, x, par), par)


@right(**MLP)
def gathers_a_weight_for_split_use(p, x, par):
    return par.psum(up(p, x, par) @ p["down"].T @ par.all_gather(p["up"], "tp", 0), "tp")


@right(**MLP)
def sums_a_weight_for_whole_use(p, x, par):
    return x * par.psum(p["up"].sum(), "tp")


@right(w=param(6, 6), s=param(6, 6, dims="ffn embed"), down=row())
def adds_whole_and_split_parameters(p, x, par):
    return down(p, par.pvary(x, "tp") @ (p["w"][:1] + p["s"]).T, par)


@right(w=param(6, 6), **MLP)
def multiplies_parameters(p, x, par):
    return par.psum(par.pvary(x, "tp") @ (p["w"] @ p["down"]) @ p["up"], "tp")


@right(w=param(6, 6), **MLP)
def reads_a_weight_and_its_transpose(p, x, par):
    return par.psum(par.pvary(x, "tp") @ p["w"].T @ p["w"] @ p["up"].T @ p["down"].T, "tp")


@right(w=param(6, 6, trainable=False), **MLP)
def reads_a_frozen_weight_both_ways(p, x, par):
    return par.psum(par.pvary(x, "tp") @ p["w"] @ p["up"].T @ p["down"].T, "tp") + x @ p["w"]


@right(g=param(6))
def masks_a_parameter_by_rank(p, x, par):
    return x * par.psum(torch.where(par.axis_index("tp") == 0, p["g"], 0.0), "tp")


@right(g=param(7, dims="vocab"))
def sums_over_padding(p, x, par):
    return x * par.psum(p["g"].sum(), "tp")


@right(
    q=param(6, 2, 6, dims="heads head embed"),
    k=param(2, 2, 6, dims="kv_heads head embed"),
    v=param(2, 2, 6, dims="kv_heads head embed"),
    out=param(6, 6, 2, dims="embed heads head"),
    norm=param(2),
)
def attends_with_few_key_heads(p, x, par):
    q, k, v = fp.nn.column_linear(x, (p["q"], p["k"], p["v"]), par)
    q, k = (fp.nn.rms_norm(y, p["norm"], par) for y in (q, k))
    y = fp.nn.attention(q, k, v, par, n_heads=6, n_kv_heads=2)
    return fp.nn.row_linear(y, p["out"], par, n_in=2)


@right(
    q=param(6, 2, 6, dims="heads head embed"),
    k=param(2, 6),
    out=param(6, 6, 2, dims="embed heads head"),
)
def attends_with_one_key_head(p, x, par):
    x = par.pvary(x, "tp")
    q = torch.einsum("bse,nhe->bnsh", x, p["q"])
    k = (x @ p["k"].T).unsqueeze(1).expand_as(q)
    y = F.scaled_dot_product_attention(q, k, k, is_causal=True)
    return par.psum(torch.einsum("bnsh,enh->bse", y, p["out"]), "tp")


# Collectives on activations


@right(**MLP)
def splits_the_sequence_and_joins_it(p, x, par):
    y = par.slice(x, "tp", 1)
    y = par.reduce_scatter(par.all_gather(y, "tp", 1) @ p["up"].T @ p["down"].T, "tp", -2) + y
    return par.all_gather(y * y, "tp", 1, to="replicated")


@right(g=param(6))
def scales_a_split_sequence(p, x, par):
    return par.all_gather(par.slice(x, "tp", 1) * p["g"], "tp", 1, to="replicated")


@right(**MLP)
def exchanges_rows_for_columns(p, x, par):
    h = par.all_to_all(up(p, x, par), "tp", 1, 2)
    return down(p, par.all_to_all(h.tanh(), "tp", 2, 1), par)


@right(**MLP)
def moves_around_the_ring_and_back(p, x, par):
    n = par.size("tp")
    h = par.ppermute(up(p, x, par), "tp", tuple((i + 1) % n for i in range(n)))
    return down(p, par.ppermute(h.tanh(), "tp", tuple((i - 1) % n for i in range(n))), par)


@right(**MLP)
def takes_a_stable_logsumexp(p, x, par):
    h = up(p, x, par)
    peak = par.pmax(h.amax(-1), "tp")
    return (par.psum((h - peak.unsqueeze(-1)).exp().sum(-1), "tp").log() + peak).unsqueeze(-1) * x


@right(**MLP)
def detaches(p, x, par):
    return x * par.psum(up(p, x, par).detach() @ p["down"].T.detach(), "tp")


@right(**MLP)
def uses_data_without_a_cotangent(p, x, par):
    return x + par.psum(par.batch["x"].to(x.dtype) @ p["up"].T @ p["down"].T, "tp")


@right(**MLP)
def hides_a_branch_from_derivatives(p, x, par):
    with torch.no_grad():
        scale = down(p, up(p, x, par), par)
    return x * scale


# Data axes


@right(g=param(6))
def varies_a_parameter_over_the_data_axes(p, x, par):
    return x * par.pvary(p["g"], "ep", "dp")


@right(g=param(6))
def shards_a_parameter_over_dp_by_hand(p, x, par):
    return x * par.all_gather(par.slice(p["g"], "dp", 0) * 2.0, "dp", 0)


@right(g=param(6))
def normalises_by_the_whole_batch(p, x, par):
    mean = par.psum(x.sum((0, 1)), "dp")
    return x * p["g"] + par.pvary(mean, "dp") * 0.1


@right(g=param(6, 6))
def contrasts_each_row_with_all_rows(p, x, par):
    f = x.sum(1) @ p["g"]
    logits = f @ par.all_gather(f, "dp", 0).T
    own = torch.arange(len(f), device=f.device) + par.axis_index("dp") * len(f)
    losses = logits.logsumexp(-1) - logits.gather(-1, own[:, None]).squeeze(-1)
    return x * 0.1 + losses[:, None, None] * 0.01


# Derivatives inside a layer


class Silu(torch.autograd.Function):
    """A backward by hand, which the trace follows."""

    @staticmethod
    def forward(x):
        return x * torch.sigmoid(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, ct):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return ct * (s + x * s * (1 - s))


class Scale(torch.autograd.Function):
    """A product with a parameter and an unused second result."""

    @staticmethod
    def forward(x, w):
        return x * w, x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, ct, unused):
        x, w = ctx.saved_tensors
        return ct * w + unused * 2, (ct * x).sum((0, 1))


@right(**MLP)
def has_a_function_of_its_own(p, x, par):
    return down(p, Silu.apply(up(p, x, par)), par)


@right(g=param(6), h=param(6), **MLP)
def scales_by_a_function_of_its_own(p, x, par):
    x = Scale.apply(x, p["g"])[0]
    return par.psum(Scale.apply(up(p, x, par) @ p["down"].T, p["h"])[0], "tp")


@right(**MLP)
def maps_over_rows(p, x, par):
    return torch.func.vmap(lambda rows: down(p, up(p, rows, par), par))(x)


@right(**MLP)
def maps_a_split_over_rows(p, x, par):
    def one(rows):
        y = par.reduce_scatter(par.pvary(rows, "tp") @ p["up"].T @ p["down"].T, "tp", 0)
        return par.all_gather(y, "tp", 0, to="replicated")

    return torch.func.vmap(one)(x)


@right(**MLP)
def differentiates_an_energy(p, x, par):
    return torch.func.grad(lambda z: par.psum(up(p, z, par).tanh().square().sum(), "tp"))(x)


@right(**MLP)
def differentiates_twice(p, x, par):
    def energy(z):
        return par.psum(up(p, z, par).tanh().pow(3).sum(), "tp")

    return torch.func.grad(lambda z: torch.func.grad(energy)(z).square().sum())(x)


@right(**MLP)
def pulls_back_inside(p, x, par):
    y, pull = torch.func.vjp(lambda z: down(p, up(p, z, par).tanh(), par), x)
    return pull(y * x)[0]


@right(w=param(6, 6), b=param(6))
def calls_a_module(p, x, par):
    return torch.func.functional_call(MODULE, {"weight": p["w"], "bias": p["b"]}, (x,))


MODULE = torch.nn.Linear(6, 6)
