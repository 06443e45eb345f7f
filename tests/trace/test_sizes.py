"""A shape that does not fit is told with the sizes that the trace used, which the author may not have written."""

import pytest

import functional_par as fp


def model(position_size, block):
    params = {
        "embed": fp.Param((16, 8), "vocab embed"),
        "position": fp.Param((position_size, 8), "seq embed"),
        "up": fp.Param((12, 8), "ffn embed"),
        "down": fp.Param((8, 12), "embed ffn"),
    }

    def embed(p, x, par):
        return fp.nn.embedding(x["tokens"], p["embed"], par, vocab=16)

    def loss(p, x, par):
        part = (x**2).sum()
        return (par.psum(part, "tp") if par.sequence_split else part), (par.batch["labels"] != -100).sum()

    layers = [("embed", ["embed"], embed), ("block", ["position", "up", "down"], block)]
    return lambda batch=None: fp.Model(params, layers, loss, batch=batch)


def mlp(p, x, par):
    x = x + fp.nn.sequence_window(p["position"], par, 0)
    return x + fp.nn.row_linear(fp.nn.column_linear(x, p["up"], par), p["down"], par)


def compose(mode="ALL_REDUCE"):
    return fp.compose(fp.shard_tp(mode=mode), fp.dp_reduce())


def test_an_open_sequence_that_a_parameter_fixes_is_told_with_the_fix():
    with pytest.raises(
        fp.ModelError, match=r"traced with tokens \[1, 2\].*made up.*fp.Model\(..., batch=\{name: fp.Input"
    ):
        compose()(model(32, mlp)())
    described = {name: fp.Input((None, 32)) for name in ("tokens", "labels")}
    compose()(model(32, mlp)(described)).plan(fp.Mesh(tp=2))


def test_in_reduce_scatter_a_plain_product_is_told_about_the_cut_sequence():
    def plain(p, x, par):
        return x + fp.nn.column_linear(x, p["up"], par) @ p["down"].T + fp.nn.sequence_window(p["position"], par, 0)

    described = {name: fp.Input((None, 32)) for name in ("tokens", "labels")}
    with pytest.raises(fp.ParallelError):
        compose("REDUCE_SCATTER")(model(32, plain)(described)).plan(fp.Mesh(tp=2))

    def whole(p, x, par):
        return x + p["position"] + (0 * p["up"]).sum() + (0 * p["down"]).sum()

    with pytest.raises(
        fp.ModelError, match=r"in REDUCE_SCATTER 1/2 of the sequence.*sequence_window cuts what is whole"
    ):
        compose("REDUCE_SCATTER")(model(32, whole)(described)).plan(fp.Mesh(tp=2))
