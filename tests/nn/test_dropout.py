"""Dropout drops the same elements in every layout, and others in another step, layer or place."""

import math

import pytest
import torch

import functional_par as fp
from functional_par import random
from functional_par.errors import ModelError
from functional_par.nn import dropout
from functional_par.run_par import RunPar, step_key

from .ranks import AR, RS, Split, close, on_ranks, stream, tensors, vjp

ROWS, SEQ, EMBED, RATE = 3, 12, 5, 0.4


def batch(rows=ROWS):
    return {"tokens": torch.zeros(rows, SEQ, dtype=torch.int64)}


def par_of(seed=0, step=0, layer="block0", rows=ROWS, first_row=0):
    return RunPar(batch=batch(rows), key=step_key(seed, step), layer=layer, first_row=first_row)


def mask(par, salt="mlp", rate=RATE, shape=(ROWS, SEQ, EMBED), **options):
    return dropout(torch.ones(shape, dtype=torch.float64), rate, par, salt, **options) != 0


def test_an_element_is_kept_by_the_bits_of_its_global_index():
    key = step_key(7, 3).fold("block0").fold("mlp")
    expected = [
        random.bits_at(key, i) + 2**63 >= RATE * 2**64 for i in range(2 * SEQ * EMBED, (2 + ROWS) * SEQ * EMBED)
    ]
    assert mask(par_of(7, 3, first_row=2)).flatten().tolist() == expected


@pytest.mark.parametrize("name", ["func", "tape"])
@pytest.mark.parametrize("mode", [AR, RS])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_output_and_gradient_on_tp_ranks_equal_one_process_bit_for_bit(tp, mode, name):
    x, ct = tensors((ROWS, SEQ, EMBED), (ROWS, SEQ, EMBED))
    kept = mask(RunPar(batch=batch()))
    where = stream(mode)

    def main(par, rank):
        local, local_ct = where.put(x, rank, tp), where.put(ct, rank, tp)
        outputs, grads = vjp(lambda x: dropout(x, RATE, par, "mlp"), [local], lambda _: [local_ct], name)
        return outputs[0], grads[0]

    # The name of the layer is empty on both sides.
    results = on_ranks(tp, main, mode, batch=batch())
    for i, whole in enumerate((x, ct)):
        actual = where.collect([r[i] for r in results], whole)
        assert torch.equal(actual, torch.where(kept, whole * (1 / (1 - RATE)), 0.0))


def test_the_sequence_may_lie_in_another_dim():
    shape = (ROWS, EMBED, SEQ)
    whole = mask(RunPar(batch=batch()), shape=shape)

    def main(par, rank):
        return mask(par, shape=(ROWS, EMBED, SEQ // 2), seq_dim=-1)

    assert torch.equal(Split(2).collect(on_ranks(2, main, RS, batch=batch()), whole), whole)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 6])
def test_microbatches_together_drop_what_the_batch_drops(microbatches):
    whole, rows = mask(par_of(rows=6), shape=(6, SEQ, EMBED)), 6 // microbatches
    parts = [mask(par_of(rows=rows, first_row=rows * i), shape=(rows, SEQ, EMBED)) for i in range(microbatches)]
    assert torch.equal(torch.cat(parts), whole)


def test_the_same_call_drops_the_same_and_another_step_seed_layer_salt_or_row_drops_others():
    assert torch.equal(mask(par_of()), mask(par_of()))
    others = [
        mask(par_of(step=1)),
        mask(par_of(seed=1)),
        mask(par_of(layer="block1")),
        mask(par_of(first_row=1)),
        mask(par_of(), salt="attn"),
        mask(par_of(), salt=1),
    ]
    masks = [mask(par_of()), *others]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            # 180 elements agree with probability 0.52 each.
            assert 0.3 < (a == b).double().mean() < 0.75


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
def test_the_rate_is_the_share_that_is_dropped_and_the_mean_is_kept(rate):
    par, n = par_of(rows=40), 40 * 50 * 100
    y = dropout(torch.ones(40, 50, 100, dtype=torch.float64), rate, par, "x")
    sigma = math.sqrt(rate * (1 - rate) / n)
    dropped = (y == 0).double()
    assert abs(dropped.mean().item() - rate) < 4 * sigma
    assert abs(y.mean().item() - 1) < 4 * sigma / (1 - rate)
    for dim, size in enumerate(y.shape):  # no row, position or column is special
        others = [d for d in range(3) if d != dim]
        far = (dropped.mean(others) - rate).abs().max().item()
        assert far < 6 * math.sqrt(rate * (1 - rate) * size / n) + size / n
    neighbours = (dropped[..., 1:] * dropped[..., :-1]).mean().item()
    assert abs(neighbours - rate**2) < 6 * rate * math.sqrt(1 / n) + 1 / n


def test_a_lower_rate_keeps_what_a_higher_rate_keeps():
    low, high = mask(par_of(), rate=0.2), mask(par_of(), rate=0.7)
    assert bool((low >= high).all())
    assert low.sum() > high.sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_mask_does_not_depend_on_the_dtype_which_is_kept(dtype):
    y = dropout(torch.ones(ROWS, SEQ, EMBED, dtype=dtype), RATE, par_of(), "mlp")
    assert y.dtype == dtype
    assert torch.equal(y != 0, mask(par_of()))


def test_a_rate_of_zero_is_the_identity_and_asks_par_for_nothing():
    x = torch.ones(1, 2, 3)
    assert dropout(x, 0.0, None, "mlp") is x


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, math.nan])
def test_a_rate_that_is_no_probability_below_one_is_refused(rate):
    with pytest.raises(ModelError, match=rf"dropout: rate={rate}: a probability in \[0, 1\)"):
        dropout(torch.ones(1, 2, 3), rate, par_of(), "mlp")


def test_another_number_of_rows_than_the_batch_has_is_refused():
    with pytest.raises(ModelError, match=r"x of shape \[2, 3, 4\] has not the 3 rows of par.batch in dim 0"):
        dropout(torch.ones(2, 3, 4), RATE, par_of(), "mlp")


def test_a_par_without_a_batch_has_no_rows():
    with pytest.raises(ModelError, match=r"par.rows: this par has no batch .* RunPar\(batch=...\)"):
        dropout(torch.ones(2, 3, 4), RATE, RunPar(), "mlp")


def test_the_second_derivative_is_that_of_the_mask():
    (x,) = tensors((ROWS, SEQ, EMBED))
    cube = lambda x: dropout(x, RATE, par_of(), "mlp").pow(3).sum()  # noqa: E731
    scale = mask(par_of()).double() / (1 - RATE)
    slope = lambda x: torch.func.grad(cube)(x).pow(2).sum()  # noqa: E731
    close(torch.func.grad(slope)(x), 36 * x.pow(3) * scale.pow(6))


def one_layer(fn, mode):
    """Embedding, hidden weights cut over tp, and a function in between."""

    def look_up(p, batch, par):
        return fp.nn.embedding(batch["tokens"], p["embed"], par, vocab=8)

    def layer(p, x, par):
        return x + fp.nn.row_linear(fn(fp.nn.column_linear(x, p["up"], par), par), p["down"], par)

    def loss(p, x, par):
        return fp.nn.cross_entropy(fp.nn.column_linear(x, p, par), par.batch["labels"], par, vocab=8).sum(), par.batch[
            "labels"
        ].numel()

    params = {
        "embed": fp.Param((8, 4), "vocab embed"),
        "up": fp.Param((8, 4), "ffn embed"),
        "down": fp.Param((4, 8), "embed ffn"),
    }
    model = fp.Model(params, [("in", {"embed": "embed"}, look_up), ("mlp", ["up", "down"], layer)], ("embed", loss))
    return fp.compose(fp.shard_tp(mode), fp.dp_reduce())(model)


def test_a_value_cut_over_tp_is_refused_since_ranks_would_draw_the_same_for_different_elements():
    with pytest.raises(
        ModelError, match=r"test_dropout.py:\d+ \(in fp.nn.dropout\).*differs along tp.*row_linear first"
    ):
        one_layer(lambda h, par: dropout(h, 0.1, par, "hidden"), "ALL_REDUCE")


def test_what_is_whole_in_reduce_scatter_is_refused():
    def whole(h, par):
        return h * dropout(par.batch["tokens"].unsqueeze(-1).double(), 0.1, par, "x").sum()

    with pytest.raises(ModelError, match=r"dropout of a value that is the same along tp.*in REDUCE_SCATTER differs"):
        one_layer(whole, "REDUCE_SCATTER")
