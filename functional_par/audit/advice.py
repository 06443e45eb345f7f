"""What to write instead, for each kind of wrong."""

from __future__ import annotations

DIFFERS = (
    "the function so that each rank has a part of the single-process result, or a term of a sum that par.psum adds."
)
PADDING = (
    "a mask before the reduction: entries at par.axis_index('tp') * local + i >= the global size are padding (for a loss, "
    "fp.nn.cross_entropy(..., vocab=...) does it), or a size that tp divides."
)
FIRST_CHUNK = (
    "positions from par.axis_index('tp') * x.shape[dim] on; of a value that is whole on every rank take this rank's part with "
    "par.slice(v, 'tp', dim), of a parameter with fp.nn.sequence_window(w, par, dim)."
)
FIRST_ROWS = "par.rows, the index of each row in the global batch, instead of a count from 0."
LOOK_UP = (
    "fp.nn.embedding(ids, w, par, vocab=...); by hand: local = ids - par.axis_index('tp') * len(w), zeros where local is "
    "outside [0, len(w)), and par.psum(..., 'tp') of the result."
)
ROWS = (
    "a result for each row that needs no other row of its microbatch. In the loss return (sum, count) of the terms, not their "
    "mean: the step divides by the global count."
)
PER_PIECE = "return total + count * term, count: then the mean loss has the term once, however the batch is cut."
APART = (
    "local sizes, such as n_heads // par.size('tp'), and in fp.Param one dim for each thing that is taken apart ('three heads "
    "head embed', of which tp cuts heads)."
)
ORDER = (
    "the parts in rank order: the chunk of rank i is the i-th. A dim that is put together from several, such as fused q, k, v, "
    "needs a dim of its own in fp.Param; ppermute and all_to_all have to be undone."
)
ZERO = "the missing term of the backward."
SIGN = "the opposite sign."
KERNEL = "the fast form so that it computes what the definition does, or leave par.kernel out and use the definition."
SUM_MISSING = "par.psum over {axis} in the backward; in plain operations par.pvary(x, '{axis}') at the input does it."
DERIVATIVE = (
    "the backward so that it is the derivative of the forward. If it is meant not to be (a straight-through estimator, say), "
    "fp.audit(..., derivatives=False)."
)
LEAF = "the transforms so that this gradient is summed once over what it owes (program.explain shows who pays)."
REFERENCE = "the model so that model(params, batch) is the reference, or the reference so that it is the model."


def added(name: str) -> str:
    return f"par.psum(partial, 'tp') + {short(name)}, or pass a bias to fp.nn.row_linear, which adds it after the sum."


def lost(name: str) -> str:
    return f"{short(name)} undivided where it is added after the sum; divide by par.size('tp') only what goes into par.psum."


def reduced(name: str, dim: int) -> str:
    if name in ("softmax", "log_softmax", "logsumexp", "cross_entropy", "nll_loss"):
        return (
            f"for a loss over a cut vocabulary fp.nn.cross_entropy(x, labels, par, vocab=...); else par.all_gather(x, 'tp', "
            f"{dim}, to='replicated') before it, or the maximum with par.pmax and the sum of exponentials with par.psum."
        )
    if name == "mean":
        return f"par.psum(x.sum({dim}), 'tp') / (x.shape[{dim}] * par.size('tp'))."
    if "norm" in name or name.startswith(("var", "std")):
        return f"par.psum(..., 'tp') of the sums of x and x ** 2 over dim {dim}, over the global size, or gather the dim first."
    return f"par.all_gather(x, 'tp', {dim}, to='replicated') before it."


def not_linear(name: str) -> str:
    return f"{name}(par.psum(partial, 'tp')): sum first."


def times(factor: float) -> str:
    if abs(factor) > 1:
        return (
            "no factor par.size(...) here, and no second sum of what has been summed. A size read from a dim that is cut "
            "(x.shape) is that of a rank's part: the whole is par.size(...) times as large."
        )
    return "no division by par.size(...) here: sums over ranks are sums, not means."


def short(name: str) -> str:
    if name.startswith("leaf "):
        return name.removeprefix("leaf ")
    return "x" if name == "the layer's input" else "that value"
