from __future__ import annotations

import math
import re

import pytest
import torch

from functional_par import tree
from functional_par.errors import ModelError
from functional_par.models import llama

from .helpers import batch_of, close_leaves, noisy
from .plain import llama_logits, mean_loss


@pytest.mark.parametrize(("kv_heads", "theta"), [(6, 10000.0), (2, 500000.0), (1, 10000.0)])
def test_loss_and_gradients_equal_llama_in_plain_torch(kv_heads, theta):
    model = llama(97, 24, 2, 6, 12, n_kv_heads=kv_heads, d_ff=40, rope_theta=theta)
    params, batch = noisy(model), batch_of(97, 12)

    def plain(p):
        return mean_loss(llama_logits(p, batch["tokens"], 2, 6 // kv_heads, theta), batch["labels"])

    loss, grads = torch.func.vjp(lambda p: model(tree.unflatten(p), batch), params)
    expected, expected_grads = torch.func.vjp(plain, params)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-10)
    ct = torch.tensor(0.7, dtype=torch.float64)
    close_leaves(grads(ct)[0], expected_grads(ct)[0])


def test_leaves_have_the_documented_names_dims_and_number():
    v, d, n, h, k, s, f = 97, 24, 3, 6, 2, 12, 40
    leaves = llama(v, d, n, h, s, n_kv_heads=k, d_ff=f).leaves
    assert {path: leaf.dims for path, leaf in leaves.items() if not re.match(r"blocks\.[12]", path)} == {
        "embed.weight": "vocab embed",
        "blocks.0.norm1.weight": "embed",
        "blocks.0.attn.q.weight": "heads head embed",
        "blocks.0.attn.k.weight": "kv_heads head embed",
        "blocks.0.attn.v.weight": "kv_heads head embed",
        "blocks.0.attn.out.weight": "embed heads head",
        "blocks.0.norm2.weight": "embed",
        "blocks.0.mlp.gate.weight": "ffn embed",
        "blocks.0.mlp.up.weight": "ffn embed",
        "blocks.0.mlp.down.weight": "embed ffn",
        "norm.weight": "embed",
        "head.weight": "vocab embed",
    }
    count = 2 * v * d + n * (2 * d * d + 2 * k * (d // h) * d + 3 * d * f + 2 * d) + d
    assert sum(math.prod(leaf.shape) for leaf in leaves.values()) == count


def test_the_measured_model_has_its_published_number_of_parameters_and_default_ffn():
    leaves = llama(8192, 512, 8, 8, 256).leaves
    assert leaves["blocks.0.mlp.gate.weight"].shape == (1376, 512)
    assert round(sum(math.prod(leaf.shape) for leaf in leaves.values()) / 1e6, 1) == 33.7


def test_projections_back_into_the_stream_start_smaller():
    leaves = llama(97, 24, 8, 6, 12, init_std=0.4).leaves
    stds = {
        path: leaf.init.std
        for path, leaf in leaves.items()
        if path.startswith("blocks.7") and hasattr(leaf.init, "std")
    }
    small = {path for path, std in stds.items() if std == pytest.approx(0.1)}
    assert small == {"blocks.7.attn.out.weight", "blocks.7.mlp.down.weight"}
    assert {std for path, std in stds.items() if path not in small} == {0.4}


def test_all_blocks_share_one_function():
    model = llama(97, 24, 3, 6, 12)
    assert [layer.name for layer in model.layers] == ["embed", "block0", "block1", "block2", "head"]
    assert len({layer.fn for layer in model.layers[1:-1]}) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vocab": 0}, "llama(vocab=0): it is an integer of at least 1."),
        ({"n_kv_heads": 0}, "llama(n_kv_heads=0): it is an integer of at least 1."),
        ({"n_kv_heads": 4}, "llama: n_heads=6 is not a multiple of n_kv_heads=4."),
        ({"d_model": 20}, "llama: d_model=20 is not a multiple of 2 * n_heads=12."),
        ({"d_model": 18}, "llama: d_model=18 is not a multiple of 2 * n_heads=12."),
    ],
)
def test_sizes_that_cannot_be_are_errors_that_name_them(wrong, message):
    sizes = {"vocab": 97, "d_model": 24, "n_layers": 2, "n_heads": 6, "seq_len": 12} | wrong
    with pytest.raises(ModelError, match=re.escape(message)):
        llama(**sizes)
