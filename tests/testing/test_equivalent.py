"""``assert_equivalent`` passes what is right, and says of what is wrong by how much and by which factor."""

import pytest
import torch

import functional_par as fp
from functional_par import reduce
from functional_par.metrics import Totals
from functional_par.testing.equivalent import made_up

TEXT = torch.randint(16, (8, 9), generator=torch.Generator().manual_seed(0))
BATCH = {"tokens": TEXT[:, :-1].contiguous(), "labels": TEXT[:, 1:].contiguous()}
MESHES = [fp.Mesh(), fp.Mesh(tp=2), fp.Mesh(dp=2), fp.Mesh(dp=2, pp=2, tp=2)]


def compose(model, microbatches=1, mode="ALL_REDUCE"):
    return fp.compose(fp.shard_tp(mode=mode), fp.stage_pp(microbatches=microbatches), fp.dp_reduce())(model)


def user_model(layer):
    params = {
        "embed": fp.Param((16, 8), "byte embed", fp.init.normal(1.0)),
        "mlp": {
            "up": fp.Param((12, 8), "ffn embed", fp.init.normal(0.5)),
            "down": fp.Param((8, 12), "embed ffn", fp.init.normal(0.5)),
            "bias": fp.Param((8,), "embed", fp.init.normal(0.5)),
        },
    }

    def embed(p, x, par):
        return p[x["tokens"]]

    def loss(p, x, par):
        return (x**2).sum(), (par.batch["labels"] != -100).sum()

    return fp.Model(params, [("embed", "embed", embed), ("mlp", "mlp", layer)], loss)


def right(p, x, par):
    hidden = (par.pvary(x, "tp") @ p["up"].T).relu()
    return x + par.psum(hidden @ p["down"].T, "tp") + p["bias"]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("mode", ["ALL_REDUCE", "REDUCE_SCATTER"])
def test_the_librarys_own_models_are_equivalent(mesh, mode):
    model = fp.models.gpt(vocab=16, d_model=8, n_layers=2, n_heads=2, seq_len=8)
    fp.testing.assert_equivalent(compose(model, microbatches=2, mode=mode), mesh, BATCH)


def test_a_models_own_layer_that_is_right_passes():
    fp.testing.assert_equivalent(compose(user_model(right)), fp.Mesh(dp=2, tp=2), BATCH)


def test_a_bias_inside_the_sum_is_found():
    def wrong(p, x, par):
        hidden = (par.pvary(x, "tp") @ p["up"].T).relu()
        return x + par.psum(hidden @ p["down"].T + p["bias"], "tp")

    program = compose(user_model(wrong))
    fp.testing.assert_equivalent(program, fp.Mesh(dp=2), BATCH)
    with pytest.raises(
        AssertionError, match=r"on Mesh\(tp=2\) the program is not .*\n  loss: off by .*\n.*gradient of embed"
    ):
        fp.testing.assert_equivalent(program, fp.Mesh(tp=2), BATCH)


def test_a_factor_is_named():
    def doubled(p, x, par):
        return right(p, x, par) * par.size("tp")

    found = {d.what: d.ratio for d in fp.testing.differences(compose(user_model(doubled)), fp.Mesh(tp=2), BATCH)}
    assert found["loss"] == pytest.approx(4.0)
    assert found["mlp.bias"] == pytest.approx(4.0)


def test_a_loss_that_depends_on_how_the_batch_is_cut_is_found():
    def normed(p, x, par):
        y = right(p, x, par)
        return y - y.mean(0)

    program = compose(user_model(normed), microbatches=2)
    with pytest.raises(AssertionError, match="loss: off by"):
        fp.testing.assert_equivalent(program, fp.Mesh(), BATCH)


def test_floating_point_fields_are_widened():
    params = {"w": fp.Param((4, 3), "embed feature", fp.init.normal(1.0))}

    def layer(w, x, par):
        return x["features"] @ w.T

    def loss(p, x, par):
        return ((x.sum(-1) - par.batch["target"]) ** 2).sum(), len(x)

    fields = {"features": fp.Input((None, 3), torch.float32), "target": fp.Input((None,), torch.float32)}
    model = fp.Model(params, [("w", "w", layer)], loss, fields, lambda batch: torch.tensor(len(batch["target"])))
    numbers = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    program = fp.compose(fp.stage_pp(microbatches=2), fp.dp_reduce())(model)
    fp.testing.assert_equivalent(program, fp.Mesh(dp=2), {"features": numbers, "target": numbers.sum(-1)})


def twice(monkeypatch):
    """Leaves that are counted on every rank, as replicas would be by a mistake."""
    before = Totals.__init__

    def init(self, plan, rank, norm):
        before(self, plan, rank, norm)
        self.mine = [(i, path) for i, path in enumerate(self.paths)]

    monkeypatch.setattr(Totals, "__init__", init)


def told(program, mesh, **options):
    with pytest.raises(AssertionError) as caught:
        fp.testing.assert_equivalent(program, mesh, **options)
    return str(caught.value).splitlines()[1:]


RIGHT = user_model(right)


def test_a_batch_is_made_up_with_some_labels_ignored_and_one_row_ignored_altogether():
    plan = compose(RIGHT, microbatches=2).plan(fp.Mesh(dp=2, tp=2))
    first, second = made_up(plan, 2)
    kept = (first["labels"] != -100).sum(1).tolist()
    assert (len(kept), kept[4], max(kept)) == (8, 0, 4)
    assert set(kept) & {1, 2, 3}
    assert first["tokens"].shape == (8, 4)
    assert not torch.equal(first["tokens"], second["tokens"])
    fp.testing.assert_equivalent(compose(RIGHT, microbatches=2), fp.Mesh(dp=2, tp=2))


@pytest.mark.parametrize("norm", [1.0, 2.0, float("inf")])
def test_several_steps_with_an_optimizer_and_clipping_are_compared(norm):
    options = {
        "steps": 3,
        "optimizer": fp.optim.adamw(lr=0.01),
        "clip": 0.1,
        "norm": norm,
        "engine": "tape",
        "donate": True,
    }
    fp.testing.assert_equivalent(compose(RIGHT), fp.Mesh(dp=2, tp=2), **options)


def test_there_may_be_a_batch_for_each_step():
    batches = made_up(compose(RIGHT).plan(fp.Mesh(dp=2)), 3)
    fp.testing.assert_equivalent(compose(RIGHT), fp.Mesh(dp=2), batches, optimizer=fp.optim.sgd(lr=0.1))


def test_a_norm_that_counts_replicas_is_told_alone(monkeypatch):
    twice(monkeypatch)
    (line,) = told(compose(RIGHT), fp.Mesh(dp=2))
    assert line.startswith("  norm: off by ")
    assert line.endswith(", 1.41421 times what it should be")


def test_a_norm_that_is_wrong_shows_in_clipped_gradients_too(monkeypatch):
    twice(monkeypatch)
    lines = told(compose(RIGHT), fp.Mesh(dp=2), clip=0.1)
    assert "  gradient of mlp.bias" in [line.split(":")[0] for line in lines]
    assert "0.707107 times what it should be" in lines[0]
    assert lines[-1].startswith("  norm: off by ")


def test_the_first_step_that_differs_is_told(monkeypatch):
    def drifting(lr):
        plain = fp.optim.sgd(lr)

        def update(grads, slots, params, step, *, inplace):
            scaled = {path: grad * (1.0 + (lr if inplace else 0.0)) for path, grad in grads.items()}
            return plain.update(scaled, slots, params, step, inplace=inplace)

        return fp.optim.Optimizer("drifting", plain.slots, plain.init, update, plain.lr)

    lines = told(compose(RIGHT), fp.Mesh(dp=2), steps=3, optimizer=drifting(0.5), donate=True)
    assert lines[0].startswith("  loss, step 2: off by ")
    assert all("step 2" in line for line in lines)
    lines = told(compose(RIGHT), fp.Mesh(dp=2), optimizer=drifting(0.5), donate=True)
    assert {line.split(" of ")[0] for line in lines} == {"  parameter"}


def test_copies_that_differ_between_ranks_are_told(monkeypatch):
    before = reduce.Gradients.pay

    def pay(self, world):
        before(self, world)
        if world.rank == 1:
            self.flat = [flat + 1e-13 for flat in self.flat]

    monkeypatch.setattr(reduce.Gradients, "pay", pay)
    lines = told(compose(RIGHT), fp.Mesh(dp=2))
    assert "  gradient of step 1 embed: the copy of rank 1 is off by 1e-13 from the others" in lines


def test_a_difference_of_the_size_of_float32s_rounding_says_so():
    hint = "loss: off by 1e-08, about the rounding of float32: is something computed in a dtype of its own?"
    assert str(fp.testing.Difference("loss", 1e-8, 1 + 1e-8, "metric")) == hint
    assert (
        str(fp.testing.Difference("loss", 1e-3, 1.001, "metric")) == "loss: off by 0.001, 1.001 times what it should be"
    )


@pytest.mark.parametrize(
    "given", [{"batch": []}, {"steps": 0}, {"batch": (1,)}], ids=["no batch", "no step", "numbers"]
)
def test_a_comparison_of_nothing_is_refused(given):
    with pytest.raises(fp.DataError, match="it compares at least one step, on a dict of tensors or a list of such"):
        fp.testing.assert_equivalent(compose(RIGHT), fp.Mesh(dp=2), **given)


def test_what_is_no_program_is_refused():
    with pytest.raises(fp.CompositionError, match=r"assert_equivalent\(NoneType, mesh\): a program, from fp.compose"):
        fp.testing.assert_equivalent(None, fp.Mesh())
