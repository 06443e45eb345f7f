"""The report, word for word, and gradients that go wrong after all layers."""

import math
import re
from dataclasses import replace

import pytest

import functional_par as fp
from functional_par.audit import leaves
from functional_par.audit.observe import Case, ranks, single
from functional_par.audit.prepare import made_up_batch, parameters
from tests import toys
from tests.audit.wrong import MISTAKES, MLP, down, language_model, up


def test_the_report_of_a_bias_inside_the_sum():
    mistake = MISTAKES["bias_in_the_sum"]
    text = re.sub(r"\d+\.\d+ s", "T s", str(fp.audit(mistake.program(), fp.Mesh(tp=2))))
    text = re.sub(r"wrong.py:\d+", "wrong.py:N", text)
    lines = text.splitlines()
    assert lines[:6] == [
        "audit on Mesh(tp=2): 1 finding",
        "compared: loss, 7 gradients, values and cotangents of 5 layers with one process, to 1e-10, on 2 rows in 1 pieces "
        "(1 replicas * 1 microbatches); T s",
        "1. added before the sum: layer 'mlp' (stage 0), audit/wrong.py:N: "
        '`return x + par.psum(up(p, x, par).tanh() @ p["down"].T + p["bias"], "tp")  # here`',
        "   leaf mlp.bias, whole on every rank, is added to a partial sum: the sum over tp has it tp=2 times. Off by 0.153.",
        "   Write: par.psum(partial, 'tp') + mlp.bias, or pass a bias to fp.nn.row_linear, which adds it after the sum.",
        lines[5],
    ]
    assert lines[5].startswith("in consequence: loss ")
    assert len(lines) == 6


def test_a_tie_whose_stages_are_not_summed_is_told():
    program = fp.compose(fp.tie("head.weight", "embed.weight"), fp.stage_pp())(toys.small_gpt())
    plan = program.plan(fp.Mesh(pp=2))
    specs = {path: replace(spec, owes=()) for path, spec in plan.specs.items()}
    broken = replace(plan, specs=specs)
    params = parameters(plan.model, 0)
    case = Case(broken, params, made_up_batch(plan, params, 0)[0], 0)
    one, many = single(case), ranks(case)
    (wrong,) = leaves.differences(case, one, many)
    finding = leaves.diagnose(case, one, many, wrong)
    assert (finding.kind, finding.what, finding.axis) == ("sum missing", "embed.weight", "pp")
    assert "Each of the stages 0, 1 has the gradient of its own layers alone" in finding.text
    assert "It is right in every layer; by the plan it owes nothing." in finding.text


def logarithm(shift):
    def layer(p, x, par):
        h = up(p, x, par)
        y = (h.square() + shift(par)).log()  # a line of its own
        return x + down(p, y, par)

    return fp.compose(fp.shard_tp())(language_model(layer, MLP))


def test_what_is_not_a_number_on_the_ranks_alone_is_told_with_its_line():
    audit = fp.audit(logarithm(lambda par: 20.0 - 19.0 * par.size("tp")), fp.Mesh(tp=2))
    (finding,) = audit.findings
    assert (finding.kind, finding.layer) == ("differs", "mlp")
    assert "a line of its own" in finding.place
    assert math.isnan(next(d for d in audit.consequences if d.what == "loss").ratio or math.nan)


def test_what_is_not_a_number_in_one_process_is_refused():
    with pytest.raises(
        fp.NonFiniteError, match=r"in one process the mean loss is nan, so there is nothing to compare with"
    ):
        fp.audit(logarithm(lambda par: -100.0), fp.Mesh(tp=2))
