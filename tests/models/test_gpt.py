from __future__ import annotations

import math
import re

import pytest
import torch

from functional_par import tree
from functional_par.errors import ModelError
from functional_par.models import gpt

from .helpers import batch_of, close_leaves, noisy
from .plain import gpt_logits, mean_loss


@pytest.mark.parametrize("bias", [True, False])
def test_loss_and_gradients_equal_gpt_in_plain_torch(bias):
    model = gpt(vocab=97, d_model=24, n_layers=2, n_heads=6, seq_len=12, d_ff=40, bias=bias)
    params, batch = noisy(model), batch_of(97, 12)
    loss, grads = torch.func.vjp(lambda p: model(tree.unflatten(p), batch), params)
    plain, plain_grads = torch.func.vjp(lambda p: mean_loss(gpt_logits(p, batch["tokens"], 2), batch["labels"]), params)
    assert loss.item() == pytest.approx(plain.item(), abs=1e-10)
    ct = torch.tensor(0.7, dtype=torch.float64)
    close_leaves(grads(ct)[0], plain_grads(ct)[0])


def test_shorter_sequences_use_the_first_positions():
    model = gpt(vocab=11, d_model=8, n_layers=1, n_heads=2, seq_len=12)
    params, batch = noisy(model), batch_of(11, 5)
    plain = mean_loss(gpt_logits(params, batch["tokens"], 1), batch["labels"])
    assert model(tree.unflatten(params), batch).item() == pytest.approx(plain.item(), abs=1e-10)


def test_the_exact_gelu_may_be_had():
    params, batch = noisy(gpt(11, 8, 1, 2, 12)), batch_of(11, 5)
    plain = mean_loss(gpt_logits(params, batch["tokens"], 1, torch.nn.functional.gelu), batch["labels"])
    model = gpt(11, 8, 1, 2, 12, gelu="exact")
    assert model(tree.unflatten(params), batch).item() == pytest.approx(plain.item(), abs=1e-10)


@pytest.mark.parametrize("bias", [True, False])
def test_leaves_have_the_documented_names_dims_and_number(bias):
    v, d, n, h, s, f = 97, 24, 3, 6, 12, 40
    leaves = gpt(vocab=v, d_model=d, n_layers=n, n_heads=h, seq_len=s, d_ff=f, bias=bias).leaves
    dims = {
        "embed.weight": "vocab embed",
        "position.weight": "seq embed",
        "blocks.0.norm1.weight": "embed",
        "blocks.0.attn.q.weight": "heads head embed",
        "blocks.0.attn.k.weight": "heads head embed",
        "blocks.0.attn.v.weight": "heads head embed",
        "blocks.0.attn.out.weight": "embed heads head",
        "blocks.0.norm2.weight": "embed",
        "blocks.0.mlp.up.weight": "ffn embed",
        "blocks.0.mlp.down.weight": "embed ffn",
        "norm.weight": "embed",
        "head.weight": "vocab embed",
    }
    biases = {"attn.q": "heads head", "attn.k": "heads head", "attn.v": "heads head", "attn.out": "embed"}
    biases |= {"mlp.up": "ffn", "mlp.down": "embed", "norm1": "embed", "norm2": "embed"}
    if bias:
        dims |= {f"blocks.0.{at}.bias": names for at, names in biases.items()} | {"norm.bias": "embed"}
    found = {path: leaf.dims for path, leaf in leaves.items() if not re.match(r"blocks\.[12]", path)}
    assert found == dims
    count = 2 * v * d + s * d + n * (4 * d * d + 2 * d * f + 2 * d) + d
    count += (n * (4 * d + f + d + 2 * d) + d) if bias else 0
    assert sum(math.prod(leaf.shape) for leaf in leaves.values()) == count


def test_projections_back_into_the_stream_start_smaller():
    leaves = gpt(vocab=97, d_model=24, n_layers=8, n_heads=6, seq_len=12, init_std=0.4).leaves
    stds = {
        path: leaf.init.std
        for path, leaf in leaves.items()
        if path.startswith("blocks.7") and hasattr(leaf.init, "std")
    }
    small = {path for path, std in stds.items() if std == pytest.approx(0.1)}
    assert small == {"blocks.7.attn.out.weight", "blocks.7.mlp.down.weight"}
    assert {std for path, std in stds.items() if path not in small} == {0.4}


def test_all_blocks_share_one_function():
    model = gpt(vocab=97, d_model=24, n_layers=3, n_heads=6, seq_len=12)
    assert [layer.name for layer in model.layers] == ["embed", "block0", "block1", "block2", "head"]
    assert len({layer.fn for layer in model.layers[1:-1]}) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vocab": 0}, "gpt(vocab=0): it is an integer of at least 1."),
        ({"n_layers": -1}, "gpt(n_layers=-1): it is an integer of at least 1."),
        ({"d_ff": 2.5}, "gpt(d_ff=2.5): it is an integer of at least 1."),
        ({"seq_len": True}, "gpt(seq_len=True): it is an integer of at least 1."),
        ({"gelu": "relu"}, "gpt(gelu='relu'): it is 'tanh' or 'exact'."),
        ({"n_heads": 5}, "gpt: d_model=24 is not a multiple of n_heads=5."),
    ],
)
def test_sizes_that_cannot_be_are_errors_that_name_them(wrong, message):
    sizes = {"vocab": 97, "d_model": 24, "n_layers": 2, "n_heads": 6, "seq_len": 12} | wrong
    with pytest.raises(ModelError, match=re.escape(message)):
        gpt(**sizes)
