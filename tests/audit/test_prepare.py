"""What an audit runs on: no zeros that hide errors, uneven labels, the whole range of ids; what is too large is refused."""

import pytest
import torch

import functional_par as fp
from functional_par.audit.prepare import made_up_batch, parameters
from tests import toys
from tests.audit.wrong import TP, language_model, right_mlp


def program(model, microbatches=2):
    return fp.compose(fp.shard_tp(), fp.dp_reduce(), fp.stage_pp(microbatches=microbatches))(model)


def test_no_leaf_stays_at_its_zeros_or_ones_and_all_are_the_same_again():
    model = toys.small_gpt()
    first, again, other = parameters(model, 0), parameters(model, 0), parameters(model, 1)
    for path, leaf in first.items():
        assert leaf.dtype == torch.float64
        assert leaf.unique().numel() == leaf.numel(), path
        assert torch.equal(leaf, again[path])
        assert not torch.equal(leaf, other[path])


def test_the_batch_has_ignored_labels_a_row_without_any_and_the_largest_ids():
    own = program(toys.small_gpt())
    plan = own.plan(fp.Mesh(dp=2, tp=2))
    batch, _ = made_up_batch(plan, parameters(plan.model, 0), 0)
    kept = (batch["labels"] != -100).sum(1)
    assert batch["tokens"].shape == (8, 4)
    assert kept.min() == 0
    assert kept.max() == 4
    assert len(set(kept.view(4, 2).sum(1).tolist())) > 1, "every microbatch has as many terms"
    assert 8 < batch["tokens"].max() < 13


def test_ids_are_found_by_trial_where_the_model_does_not_say():
    model = language_model(right_mlp, {})
    plan = program(fp.Model(model.params, model.layers, model.loss)).plan(TP)
    batch, notes = made_up_batch(plan, parameters(plan.model, 0), 0)
    assert notes == [
        "ids by trial, the largest that the model accepts: tokens < 12, labels < 12 (say so: fp.Input(..., high=...))"
    ]
    assert batch["tokens"].max() > 8
    assert batch["tokens"].shape == (4, 4)


def test_a_range_that_the_model_gives_is_kept():
    fields = {name: fp.Input((None, 4), torch.int64, high=5) for name in ("tokens", "labels")}
    model = language_model(right_mlp, {})
    plan = program(fp.Model(model.params, model.layers, model.loss, fields)).plan(TP)
    batch, notes = made_up_batch(plan, parameters(plan.model, 0), 0)
    assert batch["tokens"].max() == 4
    assert not notes


def test_a_model_that_takes_no_made_up_batch_says_what_it_raises():
    def layer(p, x, par):
        if x["ids"].device.type != "meta" and int(x["ids"].sum()) != 7:
            raise ValueError("the ids have to add up to 7.")
        return p[x["ids"]]

    params = {"w": fp.Param((4, 3), "rows embed")}
    fields = {"ids": fp.Input((None,), torch.int64)}
    model = fp.Model(params, [("look", "w", layer)], lambda p, x, par: (x.square().sum(), len(x)), fields)
    with pytest.raises(
        fp.DataError, match=r"no batch could be made up from ids: in one process the model raises ValueError: "
    ):
        fp.audit(program(model), TP)
    assert fp.audit(program(model, 1), fp.Mesh(), {"ids": torch.tensor([3, 1, 2, 1])}).ok


def test_what_is_too_large_is_refused_with_the_numbers():
    large = fp.models.gpt(vocab=40000, d_model=128, n_layers=1, n_heads=2, seq_len=8)
    with pytest.raises(
        fp.ModelError, match=r"10,\d+,\d+ parameters.*at most 4,000,000.*fewer layers.*largest leaf is embed"
    ):
        fp.audit(program(large), TP)
    long = fp.models.gpt(vocab=64, d_model=128, n_layers=2, n_heads=2, seq_len=4096)
    with pytest.raises(fp.ModelError, match=r"one forward of 4 rows takes about \d.*e\+\d+ operations on all ranks"):
        fp.audit(program(long), TP)


def test_what_is_no_program_or_no_batch_is_refused():
    with pytest.raises(fp.CompositionError, match=r"audit\(Model, mesh\): the first argument is a program"):
        fp.audit(toys.regression(), TP)
    with pytest.raises(fp.DataError, match=r"audit\(batch=...\): a dict of tensors with all rows in dim 0, not list"):
        fp.audit(program(toys.regression()), TP, [1, 2])


def test_a_plan_that_raises_is_a_diagnosis():
    with pytest.raises(fp.CompositionError, match="tp=3 does not divide"):
        fp.audit(program(toys.small_gpt()), fp.Mesh(tp=3))


def test_a_batch_without_fields_is_refused():
    program = fp.compose(fp.dp_reduce())(toys.small_gpt())
    with pytest.raises(fp.DataError, match="all rows in dim 0, not an empty one"):
        fp.audit(program, fp.Mesh(dp=2), {})
