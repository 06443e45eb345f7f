"""Parts of messages that only some layers get to see."""

import pytest

import functional_par as fp
from functional_par.trace import rules
from tests.trace.harness import column, model_of, param, program_of


def test_what_does_not_fit_on_some_ranks_is_told_that_they_hold_parts():
    def multiplies(p, x, par):
        return x + par.psum((p["up"] * p["g"]).sum(), "tp")

    model = model_of(multiplies, {"up": column(), "g": param(6, 6)})
    with pytest.raises(fp.ModelError, match=r"With tp=2 a rank holds its part of every dim that shard_tp cuts\.$"):
        program_of(model).plan(fp.Mesh(tp=2))


def test_a_maximum_has_no_transpose():
    with pytest.raises(NotImplementedError, match="pmax has no derivative"):
        rules.Max(None, frozenset({"tp"}), ("tp",), 2, "par.pmax", "layer 'loss'").dual()


def test_a_pvary_of_the_split_stream_is_told_how_to_enter_it():
    def enters_by_hand(p, x, par):
        return par.all_gather(par.pvary(par.slice(x, "tp", 1), "tp") * p["g"], "tp", 1, to="replicated")

    program = fp.compose(fp.shard_tp("REDUCE_SCATTER"))
    message = r"or, if it is the stream, which in REDUCE_SCATTER is split on the sequence, enter and leave with fp\.nn\.column_"
    with pytest.raises(fp.SuperfluousCollective, match=message):
        program(model_of(enters_by_hand, {"g": param(6)}))
