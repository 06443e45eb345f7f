"""Every mistake of ``wrong.py`` is accepted by composition, and named by the audit: kind, layer, line and what to write."""

import pytest

import functional_par as fp
from tests.audit.wrong import MISTAKES
from tests.raises import matched


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_its_kind_its_layer_and_its_line(name):
    mistake = MISTAKES[name]
    program = mistake.program()
    audit = fp.audit(program, mistake.mesh)
    (finding,) = audit.findings
    assert (finding.kind, finding.layer) == (mistake.kind, mistake.layer), audit
    assert mistake.line in finding.place, audit
    assert finding.advice
    assert finding.largest > 1e-6
    assert finding.stage == program.plan(mistake.mesh).stage_of[mistake.layer]
    with pytest.raises(AssertionError) as raised:
        audit.check()
    matched(raised.value, str(audit))
    assert all(part in str(audit) for part in (finding.text, finding.advice, finding.place, f"1. {finding.kind}"))


def test_of_axes_of_one_size_the_one_that_goes_wrong_is_named():
    (finding,) = fp.audit(MISTAKES["OverTp"].program(), fp.Mesh(dp=2, pp=2, tp=2)).findings
    assert finding.axis == "tp"
    assert "the cotangent of mlp.gate is 0.5 times (1 / tp=2) what it should be" in finding.text


def test_there_are_enough_of_them():
    assert len(MISTAKES) >= 30
    assert len({mistake.kind for mistake in MISTAKES.values()}) >= 14
