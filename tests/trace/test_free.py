"""The trace accepts exactly the programs whose gradients are right, over programs that nothing makes right."""

import pytest
from hypothesis import assume, event, given, note, settings
from hypothesis import strategies as st

import functional_par as fp
from functional_par.errors import MissingCollective, ModelError
from functional_par.trace import follow, infer, rules
from tests.trace.draws import programs
from tests.trace.free import Block, Op, Program
from tests.trace.truth import examine, long_axes

MESHES = {"tp2": fp.Mesh(tp=2), "tp3": fp.Mesh(tp=3), "dp2": fp.Mesh(dp=2), "dp2_tp2": fp.Mesh(dp=2, tp=2)}
MORE = {"ep2_dp2": fp.Mesh(ep=2, dp=2), "ep2_tp2": fp.Mesh(ep=2, tp=2), "dp2_tp3": fp.Mesh(dp=2, tp=3)}

few = settings(max_examples=max(1, settings.default.max_examples // 2))
"""Every example starts ranks twice."""

engines = st.sampled_from(["func", "tape"])


@pytest.mark.parametrize("name", MESHES)
def test_a_free_program_is_accepted_exactly_if_its_gradients_are_right(name):
    compare(MESHES[name])


@pytest.mark.deep
@pytest.mark.parametrize("name", MORE)
def test_a_free_program_is_accepted_exactly_if_its_gradients_are_right_on_more_meshes(name):
    compare(MORE[name])


def compare(mesh):
    found = []

    @few
    @given(programs(tuple(long_axes(mesh))), engines)
    def check(program, engine):
        try:
            verdict = examine(program, mesh, engine)
        except ModelError as error:
            assume("does not depend on any trainable parameter" not in str(error))
            raise
        note(verdict.message)
        event("accepted" if verdict.accepted else "refused")
        found.append(verdict.accepted)
        assert not verdict.complaint

    check()
    assert any(found)
    assert not all(found)


def chain(*ops, returns=None):
    """A program of one layer: the batch times a whole weight is value 1; then the given operations."""
    first = (Op("batch"), Op("product", (0,), "m", anchor=()))
    names = {op.leaf for op in (*first, *ops) if op.leaf}
    block = Block(
        (*first, *ops), (1 + len(ops),) if returns is None else returns, tuple((n, f"b0.{n}") for n in sorted(names))
    )
    return Program((block, Block((Op("spread", (0,), anchor=()),), (1,), ())))


MLP = chain(Op("pvary", (1,), axes=("tp",)), Op("product", (2,), "up"), Op("psum", (3,), axes=("tp",), anchor=()))
NO_ENTRY = chain(Op("product", (1,), "up"), Op("psum", (2,), axes=("tp",), anchor=()), Op("add", (3, 1), anchor=()))
NO_EXIT = chain(Op("pvary", (1,), axes=("tp",)), Op("product", (2,), "up"))
TWICE = chain(Op("psum", (1,), axes=("tp",), anchor=()))
BOTH = chain(
    *(Op("pvary", (1,), axes=("tp",)), Op("product", (2,), "up"), Op("leaf", (), "g"), Op("multiply", (3, 4))),
    *(Op("psum", (5,), axes=("tp",), anchor=()), Op("add", (6, 4), anchor=())),
)


@pytest.mark.parametrize(
    ("program", "accepted"), [(MLP, True), (NO_ENTRY, False), (NO_EXIT, False), (TWICE, False), (BOTH, False)]
)
def test_verdicts_on_known_programs(program, accepted):
    verdict = examine(program, fp.Mesh(tp=2))
    assert (verdict.accepted, verdict.complaint) == (accepted, "")


# The examination itself: a trace that is broken on purpose is found out.


def test_a_trace_that_lets_activations_meet_anything_is_found_out(monkeypatch):
    monkeypatch.setattr(follow.Typing, "meet", lambda self, v, missing: v.sources)
    monkeypatch.setattr(infer.Backward, "check", lambda *args: None)
    assert "gradient of b0.m" in examine(NO_ENTRY, fp.Mesh(tp=2)).complaint


def test_a_trace_that_lets_uses_disagree_is_found_out(monkeypatch):
    monkeypatch.setattr(infer, "_debts", lambda path, own: ())
    assert "gradient of b0.g" in examine(BOTH, fp.Mesh(tp=2)).complaint


def test_a_trace_that_lets_the_loss_differ_is_found_out(monkeypatch):
    monkeypatch.setattr(infer, "check_loss", lambda *args: ())
    assert "losses of one replica differ" in examine(NO_EXIT, fp.Mesh(tp=2)).complaint


def test_a_trace_that_refuses_what_is_right_is_found_out(monkeypatch):
    def refuse(self, value):
        raise MissingCollective("no")

    monkeypatch.setattr(rules.Sum, "typed", refuse)
    assert "the numbers are right" in examine(MLP, fp.Mesh(tp=2)).complaint
