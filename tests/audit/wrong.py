"""Models with one mistake each, as people make them, which composition accepts. The line at fault ends in ``# here``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import functional_par as fp
from functional_par import Input, Model, Param, init, random

VOCAB, SEQ, EMBED, FFN = 12, 4, 8, 8

WIDE = init.normal(0.5)
TP, DP, ALL = fp.Mesh(tp=2), fp.Mesh(dp=2), fp.Mesh(dp=2, pp=2, tp=2)


@dataclass(frozen=True)
class Mistake:
    """A wrong model, and what the audit has to say of it."""

    name: str
    make: Callable[[], Model]
    source: Any
    kind: str
    layer: str
    mesh: fp.Mesh
    mode: str
    microbatches: int
    options: dict[str, Any]

    def program(self, *transforms: Any) -> fp.Program:
        own = [fp.shard_tp(self.mode, dims=self.options.get("dims")), fp.dp_reduce(), *transforms]
        own += self.options.get("transforms", [])
        return fp.compose(*own, fp.stage_pp(microbatches=self.microbatches))(self.make())

    @property
    def line(self) -> str:
        """``file:line`` of the fault."""
        lines, start = inspect.getsourcelines(self.source)
        (offset,) = [i for i, line in enumerate(lines) if line.rstrip().endswith("# here")]
        return f"wrong.py:{start + offset}"


MISTAKES: dict[str, Mistake] = {}


def note(kind, layer, source, make, mesh, mode, microbatches, options):
    name = source.__name__
    MISTAKES[name] = Mistake(name, make, source, kind, layer, mesh, mode, microbatches, options)
    return source


def in_layer(kind, mesh=TP, mode="ALL_REDUCE", microbatches=1, source=None, layer="mlp", dims=None, **params):
    """The function is the middle layer of a language model, from a stream to a stream."""

    def wrap(fn):
        return note(
            kind, layer, source or fn, lambda: language_model(fn, params), mesh, mode, microbatches, {"dims": dims}
        )

    return wrap


def in_loss(kind, mesh=TP, mode="ALL_REDUCE", microbatches=1, head=None, vocab=VOCAB, layer="loss", **options):
    """The function is the loss of a language model."""

    def wrap(fn):
        def make():
            return language_model(right_mlp, MLP, loss=fn, head=head, vocab=vocab, **options)

        return note(kind, layer, fn, make, mesh, mode, microbatches, {})

    return wrap


def whole_embed(p, batch, par):
    return p[batch["tokens"]]


def whole_head(p, x, par):
    return x @ p.T


def cut_head(p, x, par):
    return par.pvary(x, "tp") @ p.T


def whole_loss(p, x, par):
    labels = par.batch["labels"]
    losses = F.cross_entropy(x.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return losses, (labels != -100).sum()


def stream_embed(p, batch, par):
    return fp.nn.embedding(batch["tokens"], p, par, vocab=VOCAB)


def stream_head(p, x, par):
    return fp.nn.column_linear(x, p, par)


def stream_loss(p, x, par):
    labels = par.batch["labels"]
    return fp.nn.cross_entropy(x, labels, par, vocab=VOCAB).sum(), (labels != -100).sum()


MLP = {"up": Param((FFN, EMBED), "ffn embed", WIDE), "down": Param((EMBED, FFN), "embed ffn", WIDE)}
BIAS = Param((EMBED,), "embed", init.zeros())
GATE = Param((EMBED,), "embed", init.ones())


def right_mlp(p, x, par):
    return x + par.psum((par.pvary(x, "tp") @ p["up"].T).tanh() @ p["down"].T, "tp")


def language_model(fn, params, loss=None, head=None, embed=None, vocab=VOCAB, count=None, extra=None, split=False):
    """An embedding, the layer, once more a right one, a head and a loss; ``split``: in the way of REDUCE_SCATTER."""
    table = Param((vocab, EMBED), "vocab embed" if split or embed else "ids embed", WIDE)
    cut = split or head is not None
    leaves = {
        "table": table,
        "mlp": {**MLP, **params},
        "after": MLP,
        "out": Param((vocab, EMBED), "vocab embed" if cut else "ids embed", WIDE),
        **(extra or {}),
    }
    after = right_mlp if not split else split_mlp
    layers = [
        ("embed", "table", embed or (stream_embed if split else whole_embed)),
        ("mlp", "mlp", fn),
        ("after", "after", after),
        ("head", "out", head or (stream_head if split else whole_head)),
    ]
    fields = {name: Input((None, SEQ), torch.int64, high=vocab) for name in ("tokens", "labels")}
    given = loss or (stream_loss if split else whole_loss)
    return Model(leaves, layers, (tuple(extra), given) if extra else given, fields, count)


def split_mlp(p, x, par):
    hidden = fp.nn.column_linear(x, p["up"], par)
    return x + fp.nn.row_linear(hidden.tanh(), p["down"], par)


def up(p, x, par):
    return par.pvary(x, "tp") @ p["up"].T


def down(p, h, par):
    return par.psum(h @ p["down"].T, "tp")


# Sums


@in_layer("added before the sum", bias=BIAS, **MLP)
def bias_in_the_sum(p, x, par):
    return x + par.psum(up(p, x, par).tanh() @ p["down"].T + p["bias"], "tp")  # here


@in_layer("added before the sum", mesh=ALL, microbatches=2, bias=BIAS, **MLP)
def bias_of_linear_in_the_sum(p, x, par):
    y = F.linear(up(p, x, par).tanh(), p["down"], p["bias"])  # here
    return x + par.psum(y, "tp")


@in_layer("added before the sum", mesh=fp.Mesh(tp=4), **MLP)
def residual_in_the_sum(p, x, par):
    y = up(p, x, par).tanh() @ p["down"].T
    y = par.pvary(x, "tp") + y  # here
    return par.psum(y, "tp")


@in_layer("added before the sum", bias=BIAS, **MLP)
def multiple_of_a_bias_in_the_sum(p, x, par):
    y = torch.add(up(p, x, par).tanh() @ p["down"].T, p["bias"], alpha=2)  # here
    return x + par.psum(y, "tp")


@in_layer("1/n", bias=BIAS, **MLP)
def bias_divided_by_tp_after_the_sum(p, x, par):
    y = down(p, up(p, x, par).tanh(), par)
    return x + (y + p["bias"] / par.size("tp"))  # here


@in_layer("partial sum in a non-linear function", **MLP)
def activation_of_a_partial_sum(p, x, par):
    y = F.gelu(up(p, x, par) @ p["down"].T)  # here
    return x + par.psum(y, "tp")


@in_layer("partial sum in a non-linear function", mesh=ALL, gate=GATE, **MLP)
def norm_of_a_partial_sum(p, x, par):
    y = up(p, x, par).tanh() @ p["down"].T
    y = fp.nn.rms_norm(y, p["gate"], par)  # here
    return x + par.psum(y, "tp")


@in_layer("n times", **MLP)
def sum_times_tp(p, x, par):
    y = down(p, up(p, x, par).tanh(), par)
    return x + y * par.size("tp")  # here


@in_layer("1/n", mesh=fp.Mesh(tp=4), **MLP)
def mean_instead_of_sum(p, x, par):
    y = down(p, up(p, x, par).tanh(), par)
    return x + y / par.size("tp")  # here


@in_layer("differs", **MLP)
def mistake_inside_a_map(p, x, par):
    y = torch.func.vmap(lambda row: F.gelu(row @ p["down"].T))(up(p, x, par))
    return par.psum(y, "tp")  # here


@in_layer("differs", **MLP)  # here
def mistake_in_a_map_that_is_the_result(p, x, par):
    return torch.func.vmap(lambda row: par.psum(F.gelu(row @ p["down"].T), "tp"))(up(p, x, par))


# Dims that are cut


@in_layer("reduced over a cut dim", gate=Param((FFN,), "ffn", init.ones()), **MLP)
def norm_of_a_cut_dim(p, x, par):
    h = fp.nn.rms_norm(up(p, x, par), p["gate"], par)  # here
    return x + down(p, h, par)


@in_layer("reduced over a cut dim", **MLP)
def layer_norm_of_a_cut_dim(p, x, par):
    h = up(p, x, par)
    h = F.layer_norm(h, h.shape[-1:])  # here
    return x + down(p, h, par)


ROUTER = {name: Param((4, EMBED), "heads embed", WIDE) for name in ("gate", "experts")}


@in_layer("reduced over a cut dim", mesh=ALL, microbatches=2, **ROUTER, **MLP)
def router_normalised_on_each_rank(p, x, par):
    scores = par.pvary(x, "tp") @ p["gate"].T
    weights = scores.softmax(-1)  # here
    return down(p, up(p, x, par), par) + par.psum(weights @ p["experts"], "tp")


HEADS = {
    "q": Param((4, 2, EMBED), "heads head embed", WIDE),
    "k": Param((4, 2, EMBED), "heads head embed", WIDE),
    "v": Param((4, 2, EMBED), "heads head embed", WIDE),
    "o": Param((EMBED, 4, 2), "embed heads head", WIDE),
    **MLP,
}


@in_layer("reduced over a cut dim", **HEADS)
def softmax_over_heads(p, x, par):
    x = x + down(p, up(p, x, par), par)
    q, k, v = (torch.einsum("bse,hde->bhsd", par.pvary(x, "tp"), p[n]) for n in "qkv")
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
    y = torch.einsum("bhqk,bhkd->bhqd", scores.softmax(1), v)  # here
    return par.psum(torch.einsum("bhsd,ehd->bse", y, p["o"]), "tp")


@in_layer(
    "cut dim taken apart", q=Param((8, EMBED), "heads embed", WIDE), o=Param((EMBED, 8), "embed heads", WIDE), **MLP
)
def heads_not_divided_by_tp(p, x, par):
    x = x + down(p, up(p, x, par), par)
    q = par.pvary(x, "tp") @ p["q"].T
    y = q.view(*q.shape[:2], 4, -1).softmax(-1).flatten(-2)  # here
    return par.psum(y @ p["o"].T, "tp")


@in_layer(
    "cut dim taken apart",
    fused=Param((16, EMBED), "heads embed", WIDE),
    o=Param((EMBED, 8), "embed heads", WIDE),
    **MLP,
)
def fused_weight_cut_in_one_piece(p, x, par):
    x = x + down(p, up(p, x, par), par)
    gate, value = (par.pvary(x, "tp") @ p["fused"].T).chunk(2, -1)  # here
    return par.psum((gate.sigmoid() * value) @ p["o"].T, "tp")


@in_layer("another order", **MLP)
def shards_in_another_order(p, x, par):
    h = up(p, x, par).tanh()
    n = par.size("tp")
    h = par.ppermute(h, "tp", tuple((i + 1) % n for i in range(n)))  # here
    return x + down(p, h, par)


@in_layer("wrong dim", w=Param((SEQ, SEQ), "ffn seq", WIDE), **MLP)
def gathered_along_the_wrong_dim(p, x, par):
    y = torch.einsum("fs,bse->bfe", p["w"], par.pvary(x, "tp"))
    y = par.all_gather(y, "tp", 0, to="replicated")  # here
    return x + y.view(x.shape) + down(p, up(p, x, par), par)


def split(kind, **options):
    """The function is a layer in REDUCE_SCATTER, whose stream is cut on the sequence."""

    def wrap(fn):
        params = {**MLP, **options.pop("params", {})}
        mesh = options.pop("mesh", TP)

        def make():
            return language_model(fn, params, split=True)

        return note(kind, "mlp", fn, make, mesh, "REDUCE_SCATTER", 1, {})

    return wrap


@split("reduced over a cut dim", mesh=ALL)
def mean_over_a_cut_sequence(p, x, par):
    x = split_mlp(p, x, par)
    return x - x.mean(1, keepdim=True)  # here


@split("reduced over a cut dim")
def attention_over_a_cut_sequence(p, x, par):
    x = split_mlp(p, x, par)
    q = x.unsqueeze(1)
    return x + F.scaled_dot_product_attention(q, q, q).squeeze(1)  # here


@split("first chunk on every rank", params={"position": Param((SEQ, EMBED), "seq embed", WIDE)})
def positions_from_zero_on_every_rank(p, x, par):
    x = x + p["position"][: x.shape[1]]  # here
    return split_mlp(p, x, par)


@split("first chunk on every rank", mesh=fp.Mesh(tp=2, dp=2))
def rotary_from_zero_on_every_rank(p, x, par):
    x = split_mlp(p, x, par)
    positions = torch.arange(x.shape[1], dtype=x.dtype)  # here
    angle = positions[:, None] * 0.3
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


@split("first chunk on every rank")
def dropout_by_the_local_index(p, x, par):
    x = split_mlp(p, x, par)
    index = torch.arange(x.numel()).view(x.shape)  # here
    return torch.where(random.uniform(par.layer_key, index) < 0.5, x, 0.0)


@in_layer("first chunk on every rank", mesh=DP, **MLP)
def dropout_by_the_row_of_the_microbatch(p, x, par):
    rows = torch.arange(len(x))  # here
    keep = random.uniform(par.layer_key, rows) < 0.5
    return x + keep[:, None, None] * down(p, up(p, x, par), par)


# The batch


@in_layer("depends on the other rows", mesh=DP, **MLP)
def centred_over_the_rows(p, x, par):
    x = x + down(p, up(p, x, par), par)
    return x - x.mean(0)  # here


# The vocabulary


def embedded(kind, **options):
    """The function is the embedding, whose table is cut over tp."""

    def wrap(fn):
        def make():
            return language_model(right_mlp, {}, embed=fn)

        return note(kind, "embed", fn, make, options.get("mesh", TP), "ALL_REDUCE", 1, {})

    return wrap


@embedded("look-up in a cut table")
def ids_without_the_offset(p, batch, par):
    ids = batch["tokens"]
    mine = ids < len(p)
    rows = p[ids.clamp(max=len(p) - 1)]  # here
    return par.psum(torch.where(mine[..., None], rows, 0.0), "tp")


@embedded("look-up in a cut table", mesh=ALL)
def ids_without_the_mask(p, batch, par):
    local = batch["tokens"] - par.axis_index("tp") * len(p)
    return par.psum(p[local.clamp(0, len(p) - 1)], "tp")  # here


@in_loss("reduced over a cut dim", head=cut_head)
def softmax_of_a_cut_vocabulary(p, x, par):
    labels = par.batch["labels"]
    kept = labels != -100
    local = labels - par.axis_index("tp") * x.shape[-1]
    mine = kept & (local >= 0) & (local < x.shape[-1])
    logs = x.log_softmax(-1)  # here
    picked = logs.gather(-1, local.clamp(0, x.shape[-1] - 1)[..., None])[..., 0]
    return -par.psum((picked * mine).sum(), "tp"), kept.sum()


@in_loss("padding", head=cut_head, vocab=7)
def padding_not_masked(p, x, par):
    labels = par.batch["labels"]
    kept = labels != -100
    local = labels - par.axis_index("tp") * x.shape[-1]
    mine = kept & (local >= 0) & (local < x.shape[-1])
    total = par.psum(x.exp().sum(-1), "tp")  # here
    picked = x.gather(-1, local.clamp(0, x.shape[-1] - 1)[..., None])[..., 0]
    return (total.log() * kept).sum() - par.psum((picked * mine).sum(), "tp"), kept.sum()


# The loss


@in_loss("depends on the other rows", mesh=fp.Mesh(dp=2, tp=2), count=lambda batch: torch.tensor(1))
def mean_over_the_microbatch(p, x, par):
    total, count = whole_loss(p, x, par)
    return total / count.clamp(min=1), 1  # here


@in_loss("added for every piece of the batch", mesh=fp.Mesh(pp=2), microbatches=3, extra={"weight": GATE})
def penalty_for_every_microbatch(p, x, par):
    total, count = whole_loss({}, x, par)
    penalty = 3.0 * p["weight"].square().sum()
    return total + penalty, count  # here


@in_loss("depends on the other rows", mesh=DP)
def square_of_the_sum(p, x, par):
    total, count = whole_loss(p, x, par)
    s = x.square().sum() * 0.01
    return total + s * s, count  # here


@in_loss("n times", mesh=fp.Mesh(dp=3))
def sum_times_the_replicas(p, x, par):
    total, count = whole_loss(p, x, par)
    return total * par.size("dp"), count  # here


# Backwards by hand


def with_function(kind, mesh=TP, microbatches=1, audit=None):
    """The class is an ``autograd.Function``; its ``layer`` is the layer that uses it."""

    def wrap(cls):
        def make():
            return language_model(cls.layer, {**MLP, "gate": GATE})

        return note(kind, "mlp", cls, make, mesh, "ALL_REDUCE", microbatches, {"audit": audit or {}})

    return wrap


@with_function("n times", mesh=fp.Mesh(tp=4))
class TimesTp(torch.autograd.Function):
    """A factor that no type can see."""

    @staticmethod
    def forward(x, n):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.n = inputs[1]

    @staticmethod
    def backward(ctx, ct):  # here
        return ct * ctx.n, None

    @staticmethod
    def layer(p, x, par):
        return x + down(p, TimesTp.apply(up(p, x, par).tanh(), par.size("tp")), par)


@with_function("1/n", mesh=ALL, microbatches=2)
class OverTp(torch.autograd.Function):
    """The gradient of a weight alone is wrong."""

    @staticmethod
    def forward(x, w, n):
        return x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])
        ctx.n = inputs[2]

    @staticmethod
    def backward(ctx, ct):  # here
        x, w = ctx.saved_tensors
        return ct * w, (ct * x).sum((0, 1)) / ctx.n, None

    @staticmethod
    def layer(p, x, par):
        return OverTp.apply(x + down(p, up(p, x, par), par), p["gate"], par.size("tp"))


@with_function("not the derivative")
class Squared(torch.autograd.Function):
    """Wrong alike on every rank and in one process."""

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, ct):  # here
        (x,) = ctx.saved_tensors
        return ct * x

    @staticmethod
    def layer(p, x, par):
        return x + down(p, Squared.apply(up(p, x, par)), par)


# Kernels


@in_layer("kernel", gate=GATE, **MLP)
def fast_form_without_eps(p, x, par):
    def definition(x, w):
        return x * (x.square().mean(-1, keepdim=True) + 1e-2).rsqrt() * w

    def fast(x, w):
        return F.rms_norm(x, w.shape, w, 1e-5)

    y = par.kernel(definition, fast)(x, p["gate"])  # here
    return x + down(p, up(p, y, par), par)


class SumsAgain(torch.autograd.Function):
    """Sums in the forward; its backward sums once more."""

    @staticmethod
    def forward(x, par):
        from functional_par.comm.base import AllReduce

        return par.group("tp").start(AllReduce(), x).wait() if par.size("tp") > 1 else x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.par = inputs[1]

    @staticmethod
    def backward(ctx, ct):
        from functional_par.comm.base import AllReduce

        par = ctx.par
        return (par.group("tp").start(AllReduce(), ct).wait() if par.size("tp") > 1 else ct), None


@in_layer("kernel", mesh=ALL, microbatches=2, **MLP)
def all_reduce_whose_backward_sums_again(p, x, par):
    y = up(p, x, par).tanh() @ p["down"].T
    return x + par.kernel(lambda y: par.psum(y, "tp"), lambda y: SumsAgain.apply(y, par))(y)  # here


@in_layer("kernel", mesh=fp.Mesh(dp=2, tp=2), **MLP)
def column_product_whose_backward_does_not_sum(p, x, par):
    def definition(x, w):
        return par.pvary(x, "tp") @ w.T

    h = par.kernel(definition, F.linear)(x, p["up"])  # here
    return x + down(p, h.tanh(), par)
