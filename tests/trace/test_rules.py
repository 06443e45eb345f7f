"""The types of collectives: what each makes of its input, that its transpose is one, and that shapes are those at run time."""

import pytest
import torch

import functional_par as fp
from functional_par.errors import SuperfluousCollective
from functional_par.par import TensorParallelMode
from functional_par.run_par import RunPar
from functional_par.trace import Abstract, Value
from functional_par.trace.follow import Typing
from functional_par.trace.infer import Setting
from functional_par.trace.par import TracePar
from functional_par.trace.values import Source

TP = 3
SAME, VARIES = frozenset(), frozenset({"tp"})

CALLS = {
    "psum": lambda par, x: par.psum(x, "tp"),
    "pmax": lambda par, x: par.pmax(x, "tp"),
    "pvary": lambda par, x: par.pvary(x, "tp"),
    "all_gather": lambda par, x: par.all_gather(x, "tp", -1),
    "all_gather_replicated": lambda par, x: par.all_gather(x, "tp", 0, to="replicated"),
    "slice": lambda par, x: par.slice(x, "tp", -2),
    "take": lambda par, x: par.take(x, "tp", 1, (0, 2, 1), 4),
    "reduce_scatter": lambda par, x: par.reduce_scatter(x, "tp", 1),
    "all_to_all": lambda par, x: par.all_to_all(x, "tp", 0, 2),
    "ppermute": lambda par, x: par.ppermute(x, "tp", (1, 2, 0)),
}

TYPES = {  # of the result, for an input that is the same, and for one that varies
    "psum": (None, SAME),
    "pmax": (None, SAME),
    "pvary": (VARIES, None),
    "all_gather": (None, VARIES),
    "all_gather_replicated": (None, SAME),
    "slice": (VARIES, None),
    "take": (VARIES, VARIES),
    "reduce_scatter": (None, VARIES),
    "all_to_all": (None, VARIES),
    "ppermute": (None, VARIES),
}


def tracing(active=("ep", "dp", "tp"), tp=TP):
    sizes = {"ep": 1, "pp": 1, "dp": 2, "cp": 1, "tp": tp}
    setting = Setting(
        sizes, frozenset(active), frozenset({"dp"}), {}, {}, mode=TensorParallelMode.ALL_REDUCE, async_comm=False
    )
    typing = Typing("layer")
    return typing, TracePar(typing, setting, {})


def trace_call(name, axes, **value):
    typing, par = tracing()
    x = typing.input(Abstract((6, 6, 3), torch.float64, Value(axes=axes, **value)))
    with typing:
        y = CALLS[name](par, x)
    return typing, x, y


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("varies", [False, True])
def test_the_result_of_a_collective_has_the_type_of_the_table(name, varies):
    axes = VARIES | {"dp"} if varies else frozenset({"dp"})
    expected = TYPES[name][varies]
    if expected is None:
        with pytest.raises(SuperfluousCollective, match="over tp"):
            trace_call(name, axes)
        return
    typing, _, y = trace_call(name, axes)
    assert typing.value(y).axes == expected | {"dp"}


@pytest.mark.parametrize("name", CALLS)
def test_shapes_are_those_at_run_time(name):
    axes = SAME if TYPES[name][0] is not None else VARIES
    _, _, y = trace_call(name, axes)

    def main(world):
        return CALLS[name](RunPar({("tp",): world.group("tp")}), torch.zeros(6, 6, 3, dtype=torch.float64)).shape

    assert fp.run(main, fp.Mesh(tp=TP))[0] == y.shape


@pytest.mark.parametrize("name", [name for name in CALLS if name != "pmax"])
def test_the_transpose_goes_back_to_the_input_type_and_shape(name):
    axes = SAME if TYPES[name][0] is not None else VARIES
    typing, x, y = trace_call(name, axes, grad=True, sources=frozenset({Source("w")}))
    ct = typing.emit(y.shape, y, Value(axes=typing.value(y).axes, cotangent=True))
    typing.backward = True
    with typing:
        (back,) = torch.autograd.grad(y, x, ct, retain_graph=True)
    assert back.shape == x.shape
    owed = VARIES if name == "take" else SAME  # a window of a whole leaf leaves a debt
    assert typing.value(back) == Value(axes=axes | owed, cotangent=True) or typing.value(back).axes == axes | owed


def test_a_maximum_carries_no_cotangent():
    typing, _, y = trace_call("pmax", VARIES, grad=True, data=True)
    assert typing.value(y) == Value(data=True)
    assert not y.requires_grad


def test_what_was_summed_or_gathered_is_closed():
    for name in ("psum", "all_gather_replicated"):
        typing, _, y = trace_call(name, VARIES, grad=True, sources=frozenset({Source("w")}))
        assert typing.value(y) == Value(grad=True, sources=frozenset({Source("w")}), closed=VARIES)


def test_a_window_of_a_whole_leaf_owes():
    typing, _, y = trace_call("take", SAME, grad=True, sources=frozenset({Source("w")}))
    assert typing.value(y) == Value(VARIES, grad=True, sources=frozenset({Source("w", VARIES)}))


def test_the_rank_is_a_varying_integer():
    typing, par = tracing()
    with typing:
        index = par.axis_index("tp")
    assert (index.dtype, index.shape, typing.value(index)) == (torch.int64, (), Value(VARIES))


@pytest.mark.parametrize("name", [name for name in CALLS if name != "take"])
def test_a_collective_along_an_axis_without_a_transform_returns_its_input(name):
    typing, par = tracing(active=("dp",), tp=1)
    x = typing.input(Abstract((6, 6, 3), torch.float64))
    with typing:
        y = par.ppermute(x, "tp", (0,)) if name == "ppermute" else CALLS[name](par, x)
    assert y is x or (name == "pmax" and y.shape == x.shape)


def test_merged_axes_larger_than_one_are_noted_for_the_groups():
    typing, par = tracing()
    x = typing.input(Abstract((6,), torch.float64, Value(frozenset({"ep", "dp", "tp"}))))
    with typing:
        par.psum(x, "tp", "dp", "ep")
        par.psum(x, "ep", "tp")
    assert par.merged == {("dp", "tp")}


def test_constants_of_a_backward_belong_to_no_rank():
    typing, x, y = trace_call("pvary", SAME, grad=True, data=True)
    typing.backward = True
    with typing:
        (back,) = torch.autograd.grad(y, x, torch.zeros_like(y))
    assert typing.value(back) == Value()
