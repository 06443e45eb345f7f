"""A model that is not what its author wrote down as the reference is told so, with what is missing."""

import pytest
import torch
import torch.nn.functional as F

import functional_par as fp
from tests.audit.wrong import DP, GATE, MLP, VOCAB, language_model, right_mlp, whole_loss

MESH = fp.Mesh(dp=2, tp=2)


def program(*transforms, **options):
    model = language_model(options.pop("fn", right_mlp), options.pop("params", MLP), **options)
    return fp.compose(fp.shard_tp(), fp.dp_reduce(), *transforms)(model)


def logits(params, batch, head="out"):
    x = params["table"][batch["tokens"]]
    for name in ("mlp", "after"):
        x = x + torch.tanh(x @ params[name]["up"].T) @ params[name]["down"].T
    return x @ params[head].T


def reference(params, batch):
    return F.cross_entropy(logits(params, batch).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def only_finding(own, reference, mesh=DP):
    audit = fp.audit(own, mesh, reference=reference)
    (finding,) = audit.findings
    return finding, audit


def test_a_model_that_is_its_reference_is_right():
    assert fp.audit(program(), MESH, reference=reference).ok
    tied = program(fp.tie("out", "table"))
    assert fp.audit(tied, MESH, reference=lambda p, b: reference({**p, "out": p["table"]}, b)).ok


def test_a_missing_tie_is_named():
    finding, audit = only_finding(program(), lambda p, b: reference({**p, "out": p["table"]}, b))
    assert (finding.kind, finding.what) == ("missing tie", "out")
    assert finding.advice == 'fp.tie("out", "table") among the transforms.'
    assert "table lacks the gradient of out" in finding.text
    assert "table" in [difference.what for difference in audit.consequences]


def test_a_loss_that_counts_ignored_labels_is_named():
    def counted(p, x, par):
        labels = par.batch["labels"]
        return whole_loss(p, x, par)[0], labels.numel()

    own = program(loss=counted, count=lambda batch: torch.tensor(batch["labels"].numel()))
    finding, _ = only_finding(own, reference)
    assert (finding.kind, finding.what) == ("counts other terms", "loss")
    assert "divides by 16 terms where the reference divides by the number of labels that are not -100" in finding.text
    assert finding.ratio < 1


def test_a_loss_over_the_rows_is_named():
    def rows(p, x, par):
        return whole_loss(p, x, par)[0], len(x)

    own = program(loss=rows, count=lambda batch: torch.tensor(len(batch["labels"])))
    finding, _ = only_finding(own, reference)
    assert finding.kind == "counts other terms"
    assert "divides by 4 terms" in finding.text
    assert finding.ratio > 1


def test_another_function_is_told_by_its_loss():
    finding, audit = only_finding(program(), lambda p, b: reference(p, b) + p["out"].square().sum())
    assert (finding.kind, finding.what, finding.layer) == ("differs", "loss", "loss")
    assert "In one process the model's loss is" in finding.text
    assert [difference.what for difference in audit.consequences] == ["out"]


def test_the_same_loss_with_other_gradients_is_told_by_leaf():
    def detached(p, x, par):
        return right_mlp(p, x, par) * (p["gate"] / p["gate"].detach())

    own = program(fn=detached, params={**MLP, "gate": GATE})
    finding, _ = only_finding(own, reference)
    assert (finding.kind, finding.what) == ("differs", "mlp.gate")
    assert finding.text == "The reference does not depend on mlp.gate, but the model does."

    def twice(params, batch):
        up = params["mlp"]["up"]
        return reference({**params, "mlp": {**params["mlp"], "up": 2 * up - up.detach()}}, batch)

    finding, _ = only_finding(program(), twice)
    assert (finding.kind, finding.what, finding.ratio) == ("1/n", "mlp.up", pytest.approx(0.5))
    assert "0.5 times" in finding.text


def test_a_reference_that_is_no_mean_loss_is_refused():
    with pytest.raises(fp.ModelError, match=r"audit\(reference=...\): it returned \[4, 4, 12\]. It is a function"):
        fp.audit(program(), DP, reference=logits)
    with pytest.raises(fp.ModelError, match="it returned float"):
        fp.audit(program(), DP, reference=lambda p, b: 1.0)
    assert VOCAB == 12
