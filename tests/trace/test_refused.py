"""What would train on a wrong gradient is refused, with the layer, the line, the axis and the fix."""

from __future__ import annotations

import copy
import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F

import functional_par as fp
from functional_par.errors import MissingCollective, ModelError, SuperfluousCollective
from tests.raises import matched
from tests.trace.harness import judge, model_of, param, program_of
from tests.trace.programs import MLP, down, up

REFUSED = []
"""(error, words of the message, parameters, layer). The line at fault, if there is one, ends in ``# here``."""


def refused(error, *words, **params):
    def note(fn):
        REFUSED.append((error, words, params, fn))
        return fn

    return note


MEETS = "is the same on every rank of tp meets values that differ along tp"
ACTIVATION = "an activation that " + MEETS
SUMMED = "a value gathered or summed from parameters that " + MEETS
BOTH = "is read whole in one place"

# Missing collectives


@refused(MissingCollective, ACTIVATION, "par.psum(..., 'tp')", "par.pvary(..., 'tp')", **MLP)
def no_pvary(p, x, par):
    h = x @ p["up"].T  # here
    return down(p, h, par)


@refused(MissingCollective, ACTIVATION, **MLP)
def no_pvary_behind_views(p, x, par):
    x = x.reshape(-1, 6).t().unsqueeze(0).expand(1, 6, -1)[0].t().view(x.shape)
    h = x @ p["up"].T  # here
    return down(p, h, par)


@refused(MissingCollective, ACTIVATION, **MLP)
def whole_written_into_a_split_buffer(p, x, par):
    h = up(p, x, par) @ p["down"].T
    h[:, 3:] = x[:, 3:]  # here
    return par.psum(h, "tp")


@refused(MissingCollective, ACTIVATION, **MLP)
def split_written_into_a_whole_buffer(p, x, par):
    out = torch.zeros_like(x)
    out[:, 3:] = x[:, 3:]
    out[:, :3] = up(p, x[:, :3], par) @ p["down"].T  # here
    return par.psum(out, "tp")


@refused(MissingCollective, ACTIVATION, **MLP)
def split_written_behind_the_derivative(p, x, par):
    y = x * 1.0
    y.detach().add_(up(p, x, par).detach().sum())  # here
    return y


@refused(MissingCollective, ACTIVATION, **MLP)
def mask_that_depends_on_the_rank(p, x, par):
    y = torch.where(par.axis_index("tp") == 0, x, 0.0)  # here
    return par.psum(y, "tp")


@refused(MissingCollective, ACTIVATION, **MLP)
def whole_gathered_by_split_indices(p, x, par):
    at = up(p, x, par).topk(1, -1).indices
    y = x.gather(-1, at)  # here
    return par.psum(y, "tp")


@refused(MissingCollective, ACTIVATION, **MLP)
def whole_times_detached_partial_sums(p, x, par):
    partial = (up(p, x, par) @ p["down"].T).detach()
    y = x * partial  # here
    return par.psum(y, "tp")


@refused(MissingCollective, ACTIVATION, **MLP)
def whole_times_the_data_of_partial_sums(p, x, par):
    partial = (up(p, x, par) @ p["down"].T).data
    y = x * partial  # here
    return par.psum(y, "tp")


@refused(MissingCollective, ACTIVATION, **MLP)
def whole_times_a_copy_of_partial_sums(p, x, par):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        partial = torch.tensor(up(p, x, par) @ p["down"].T)
    y = x * partial  # here
    return par.psum(y, "tp")


@refused(MissingCollective, ACTIVATION, **MLP)
def whole_times_an_out_argument(p, x, par):
    out = torch.empty_like(x)
    torch.mul((up(p, x, par) @ p["down"].T).detach(), 2.0, out=out)
    return x * out  # here


@refused(MissingCollective, ACTIVATION, **MLP)
def complex_whole_times_split(p, x, par):
    z = torch.complex(x, 2 * x)
    y = z * (up(p, x, par) @ p["down"].T)  # here
    return par.psum(y.real, "tp")


@refused(MissingCollective, ACTIVATION, g=param(6, 6), **MLP)
def router_without_pvary(p, x, par):
    gate = (x @ p["g"]).softmax(-1)[..., :1]
    y = gate * (up(p, x, par) @ p["down"].T)  # here
    return par.psum(y, "tp")


@refused(MissingCollective, ACTIVATION, **MLP)
def no_pvary_inside_vmap(p, x, par):
    def one(rows):
        return down(p, rows @ p["up"].T, par)  # here

    return torch.func.vmap(one)(x)


@refused(MissingCollective, ACTIVATION, **MLP)
def no_pvary_inside_grad(p, x, par):
    return torch.func.grad(lambda z: par.psum((z @ p["up"].T).square().sum(), "tp"))(x)  # here


@refused(MissingCollective, ACTIVATION, **MLP)
def windows_of_an_activation(p, x, par):
    n = 6 // par.size("tp")
    y = par.take(x, "tp", 1, tuple(range(0, 6, n)), n)  # here
    return par.all_gather(y, "tp", 1, to="replicated")


@refused(MissingCollective, "is the same on every rank of dp meets values that differ along dp", g=param(6))
def batch_statistics_without_pvary(p, x, par):
    mean = par.psum(x.sum((0, 1)), "dp")
    return x * mean * p["g"]  # here


@refused(MissingCollective, SUMMED, **MLP)
def norm_of_a_split_weight_without_pvary(p, x, par):
    norm = par.psum(p["up"].square().sum(), "tp").sqrt()
    w = p["up"] / norm  # here
    return down(p, par.pvary(x, "tp") @ w.T, par)


@refused(MissingCollective, SUMMED, "par.pvary(..., 'tp')", **MLP)
def gathered_weight_without_pvary(p, x, par):
    w = par.all_gather(p["up"], "tp", 0, to="replicated")
    y = (up(p, x, par) @ p["down"].T) @ w  # here
    return par.psum(y, "tp")


@refused(MissingCollective, "body.g " + BOTH, "split along tp", "par.pvary(w, 'tp')", g=param(6), **MLP)
def leaf_scales_partial_sums_and_the_whole(p, x, par):
    y = par.psum((up(p, x, par) @ p["down"].T) * p["g"], "tp")  # here
    return y + p["g"]


@refused(MissingCollective, "body.g " + BOTH, g=param(6))
def leaf_masked_by_rank_and_read_whole(p, x, par):
    y = x * par.psum(torch.where(par.axis_index("tp") == 0, p["g"], 0.0), "tp")  # here
    return y + p["g"]


@refused(MissingCollective, "body.w " + BOTH, w=param(6, 6), down=MLP["down"])
def leaf_taken_from_and_read_whole(p, x, par):
    n = 6 // par.size("tp")
    w = par.take(p["w"], "tp", 0, tuple(range(0, 6, n)), n)
    y = down(p, par.pvary(x, "tp") @ w.T, par)  # here
    return y + x @ p["w"]


@refused(MissingCollective, "body.g " + BOTH, "split along ep and dp", g=param(6))
def leaf_summed_over_dp_twice_in_one_place(p, x, par):
    return x * par.pvary(p["g"], "ep", "dp") + x * p["g"]  # here


# Superfluous collectives


@refused(
    SuperfluousCollective, "par.psum over tp of a value that is already the same", "tp times too large", g=param(6)
)
def sum_of_the_same(p, x, par):
    return par.psum(x * p["g"], "tp")  # here


@refused(SuperfluousCollective, "par.psum over tp of a value that is already the same", g=param(6))
def sum_over_two_axes_of_what_differs_along_one(p, x, par):
    return x * par.pvary(par.psum(x.sum(), "dp", "tp"), "dp")  # here


@refused(
    SuperfluousCollective, "par.pmax over tp of a value that is already the same", "nothing to exchange", g=param(6)
)
def maximum_of_the_same(p, x, par):
    return x * par.pmax(p["g"], "tp")  # here


@refused(SuperfluousCollective, "par.all_gather over tp of a value that is already the same", "nothing to exchange")
def gather_of_the_same(p, x, par):
    return par.all_gather(x, "tp", 1, to="replicated")  # here


@refused(SuperfluousCollective, "par.reduce_scatter over tp of a value that is already the same", "times too large")
def scatter_of_the_same(p, x, par):
    return par.reduce_scatter(x, "tp", 1)  # here


@refused(SuperfluousCollective, "par.pvary over tp of a value that already differs", "Leave tp out", **MLP)
def variation_of_what_varies(p, x, par):
    h = par.pvary(up(p, x, par), "tp")  # here
    return down(p, h, par)


@refused(SuperfluousCollective, "par.slice over tp of a value that differs", "par.reduce_scatter", **MLP)
def slice_of_partial_sums(p, x, par):
    y = par.slice(up(p, x, par) @ p["down"].T, "tp", 1)  # here
    return par.all_gather(y, "tp", 1, to="replicated")


# Backwards by hand


class SumsTwice(torch.autograd.Function):
    """Megatron's g with the rule of the functional collectives, which is tp times too large."""

    @staticmethod
    def forward(x, par):
        return par.psum(x, "tp")

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.par = inputs[1]

    @staticmethod
    def backward(ctx, ct):
        return ctx.par.psum(ct, "tp"), None  # here


@refused(SuperfluousCollective, "par.psum over tp of a value that is already the same", **MLP)
def function_whose_backward_sums_twice(p, x, par):
    return SumsTwice.apply(up(p, x, par) @ p["down"].T, par)


class Mixes(torch.autograd.Function):
    """Whose backward brings in what the forward does not show."""

    @staticmethod
    def forward(x, w):
        return x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, ct):
        return ct * ctx.saved_tensors[0].sum(), None


@refused(MissingCollective, "the backward of an autograd.Function gives the activation", "differs along tp", **MLP)
def function_whose_backward_mixes_in_a_split_weight(p, x, par):
    return Mixes.apply(x, p["up"])


class ScalesAndSums(torch.autograd.Function):
    """Whose backward pays a debt that will be paid again."""

    @staticmethod
    def forward(x, w, par):
        return x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])
        ctx.par = inputs[2]

    @staticmethod
    def backward(ctx, ct):
        x, w = ctx.saved_tensors
        return ct * w, ctx.par.psum((ct * x).sum((0, 1)), "tp"), None


@refused(SuperfluousCollective, "body.g meets values that differ along tp", "has already done so", g=param(6), **MLP)
def function_whose_backward_pays_the_debt(p, x, par):
    return par.psum(ScalesAndSums.apply(up(p, x, par) @ p["down"].T, p["g"], par), "tp")


@refused(SuperfluousCollective, "body.g meets values that differ", "done so for a part of it", g=param(6), **MLP)
def function_whose_backward_pays_the_debt_of_one_of_two_uses(p, x, par):
    y = up(p, x, par) @ p["down"].T
    return par.psum(ScalesAndSums.apply(y, p["g"], par) + y * p["g"], "tp")


class MakesUp(torch.autograd.Function):
    """Whose backward is not linear: it leaves the cotangent out."""

    @staticmethod
    def forward(x, w):
        return x * 1.0

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, ct):
        return ctx.saved_tensors[0].sum().expand_as(ct), None


@refused(MissingCollective, "the backward of an autograd.Function gives the activation", "differs along tp", **MLP)
def function_whose_backward_is_made_of_a_split_weight_alone(p, x, par):
    return MakesUp.apply(x, p["up"])


class NoMeta(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, ct):
        raise NotImplementedError("no kernel")


@refused(ModelError, "the backward of NoMetaBackward cannot be followed", "no kernel", "par.kernel(definition, fast)")
def function_without_a_backward_on_meta(p, x, par):
    return NoMeta.apply(x)


@refused(SuperfluousCollective, "par.psum over tp of a value that is already the same", **MLP)
def hook_that_sums(p, x, par):
    y = down(p, up(p, x, par), par)
    y.register_hook(lambda ct: par.psum(ct, "tp"))  # here
    return y


@refused(ModelError, "a forward-mode derivative", "of par.pvary", "torch.func.vjp", **MLP)
def forward_mode(p, x, par):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates what its forward mode uses
        return torch.func.jvp(lambda z: par.pvary(z, "tp") @ p["up"].T, (x,), (x,))[1]  # here


# Impurity

LEFT: dict[str, torch.Tensor] = {}
CLOSED = torch.zeros(6)
TRAINED = torch.zeros(6, requires_grad=True)


@refused(ModelError, "closes over a tensor of shape [6] that requires a gradient", "make it a leaf of params")
def closed_over_weight(p, x, par):
    return x * TRAINED  # here


@refused(ModelError, "copy_ modifies in place", "Layers are pure functions", g=param(6))
def write_to_a_closed_over_tensor(p, x, par):
    CLOSED[:3].copy_(p["g"][:3].detach())  # here
    return x * CLOSED


@refused(ModelError, "mul_ modifies in place an input")
def write_to_the_input(p, x, par):
    return x.mul_(2)  # here


@refused(ModelError, "add_ modifies in place an input")
def write_to_a_view_of_the_input(p, x, par):
    x[..., 1:].unsqueeze(0).add_(1)  # here
    return x


@refused(ModelError, "embedding_renorm_ modifies in place an input", g=param(6, 6))
def lookup_that_shrinks_its_weight(p, x, par):
    return x + F.embedding(par.batch["ids"], p["g"], max_norm=1.0)  # here


@refused(ModelError, "add_ modifies in place", **MLP)
def write_to_what_was_handed_to_a_collective(p, x, par):
    h = up(p, x, par)
    y = par.all_gather(h, "tp", 1)
    h.add_(1)  # here
    return par.psum(h @ p["down"].T, "tp") + par.psum(y, "tp").sum()


@refused(ModelError, "set_ gives a tensor other memory", **MLP)
def other_memory(p, x, par):
    y = torch.zeros_like(x)
    y.set_(up(p, x, par).detach())  # here
    return x * y


@refused(ModelError, "is wrapped inside the layer (nn.Parameter, as_subclass)", g=param(6))
def parameter_made_inside(p, x, par):
    return x * torch.nn.Parameter(p["g"])  # here


@refused(ModelError, "is wrapped inside the layer (nn.Parameter, as_subclass)", **MLP)
def subclass_made_inside(p, x, par):
    class Named(torch.Tensor):
        pass

    y = (up(p, x, par) @ p["down"].T).as_subclass(Named)
    return x * y


@refused(ModelError, "was given other memory (x.data = y)", **MLP)
def data_that_is_assigned(p, x, par):
    y = x * 1.0
    y.data = up(p, x, par).detach()
    return x * y.sum()  # here


@refused(ModelError, "is copied or pickled as a Python object", "x.clone()", **MLP)
def copy_as_a_python_object(p, x, par):
    y = copy.copy(up(p, x, par).detach())  # here
    return x * y


@refused(ModelError, "draws from torch's global generator", "functional_par.random")
def dropout(p, x, par):
    return F.dropout(x, 0.5)  # here


@refused(ModelError, "draws from torch's global generator")
def attention_with_dropout(p, x, par):
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)  # here


@refused(ModelError, "does not support item assignment")
def write_to_the_batch(p, x, par):
    par.batch["more"] = x  # here
    return x


@refused(ModelError, "failed while it was traced", "must not turn a tensor into a Python number")
def reads_a_number(p, x, par):
    return x * float(x.detach().sum())  # here


@refused(ModelError, "A shape must not depend on the values", "torch.where")
def shape_that_depends_on_values(p, x, par):
    return x * x[x > 0].sum()  # here


@refused(ModelError, "KeyError", "described with the fields x, ids", "fp.Input")
def unknown_field(p, x, par):
    return x * par.batch["mask"]  # here


@refused(ModelError, "don't support automatic differentiation", **MLP)
def out_argument_with_a_gradient(p, x, par):
    return torch.mul(x, 2.0, out=torch.empty_like(x))  # here


# Arguments of collectives


@refused(fp.errors.MeshError, "collective over 'rows'")
def unknown_axis(p, x, par):
    return par.psum(x, "rows")  # here


@refused(fp.errors.MeshError, "collective over 'pp'")
def axis_of_stages(p, x, par):
    return par.psum(x, "pp")  # here


@refused(ModelError, "par.group('tp') is for kernels")
def raw_group(p, x, par):
    par.group("tp")  # here
    return x


@refused(ModelError, "par.psum of float; give a tensor")
def sum_of_a_number(p, x, par):
    return x * par.psum(3.0, "tp")  # here


@refused(ModelError, "par.all_gather along dim 7 of a tensor of shape")
def dim_that_is_not_there(p, x, par):
    return par.all_gather(x, "tp", 7)  # here


@refused(ModelError, "all_gather(to='whole'): it is 'varying' or 'replicated'")
def gather_to_what(p, x, par):
    return par.all_gather(x, "tp", 1, to="whole")  # here


@refused(ModelError, "par.take(starts=(0,), length=7) along tp of size 1", "inside the 6 entries of dim 1")
def window_that_is_too_long(p, x, par):
    return par.take(x, "tp", 1, (0,), 7)  # here


@refused(ModelError, "par.ppermute(to=(0, 0)) along tp", "permutation of the 1 ranks")
def no_permutation(p, x, par):
    return par.ppermute(x, "tp", (0, 0))  # here


@pytest.mark.parametrize(("error", "words", "params", "fn"), REFUSED, ids=[fn.__name__ for *_, fn in REFUSED])
def test_a_wrong_layer_is_refused_with_its_name_the_line_and_the_fix(error, words, params, fn):
    with pytest.raises(error) as caught:
        program_of(model_of(fn, params))
    message = str(caught.value)
    for word in ("layer 'body'", *words):
        matched(caught.value, word)
    lines, start = inspect.getsourcelines(fn)
    for i, line in enumerate(lines):
        if line.rstrip().endswith("# here"):
            assert f"trace/test_refused.py:{start + i}" in message
            assert line.strip() in message


def test_a_backward_at_fault_is_named_by_its_own_line():
    with pytest.raises(SuperfluousCollective) as caught:
        program_of(model_of(function_whose_backward_sums_twice, MLP))
    matched(caught.value, 'return ctx.par.psum(ct, "tp"), None  # here')


def test_a_backward_that_pays_is_found_though_the_leaf_goes_on_to_another_layer():
    def first(p, x, par):
        y = par.psum(ScalesAndSums.apply(up(p, x, par) @ p["down"].T, p["g"], par), "tp")
        return {"x": y, "g": p["g"]}

    def later(p, x, par):
        return par.psum(up(p, x["x"], par) @ p["down"].T * x["g"], "tp")

    model = model_of(first, {"g": param(6), **MLP}, after=[("later", "body", later)])
    with pytest.raises(
        SuperfluousCollective, match=r"layer 'body'.*body\.g meets values that differ.*already done so\."
    ):
        program_of(model)


def test_a_use_that_no_gradient_reaches_is_told_as_what_it_is():
    def fn(p, x, par):
        dead = (up(p, x, par) @ p["down"].T * p["g"]).detach()
        return par.psum(dead, "tp") + x * p["g"]

    with pytest.raises(MissingCollective, match=r"body\.g is read whole in one place"):
        program_of(model_of(fn, {"g": param(6), **MLP}))


def test_sizes_that_axes_do_not_divide_are_refused_on_the_mesh():
    def fn(p, x, par):
        return par.all_gather(par.slice(x[:, :4], "tp", 1), "tp", 1, to="replicated")

    program = program_of(model_of(fn, {}))
    with pytest.raises(
        ModelError, match=r"par.slice cuts dim 1 of \[1, 4, 6\] in tp=3 chunks, but 4 is not a multiple of 3"
    ):
        program.plan(fp.Mesh(tp=3))


def test_the_same_checks_hold_on_a_mesh_of_ones_and_on_any_other():
    model = model_of(no_pvary, MLP)
    with pytest.raises(MissingCollective):
        fp.compose(fp.shard_tp())(model)
    fp.compose(fp.dp_reduce())(model).plan(fp.Mesh(dp=2))  # tp is nothing here


def leave(p, x, par):
    LEFT["x"] = up(p, x, par)
    return x


def test_a_tensor_that_another_layer_left_behind_is_refused():
    model = model_of(leave, MLP, after=[("next", "enter", lambda p, x, par: x * LEFT["x"].sum())])
    with pytest.raises(ModelError, match=r"layer 'next'.*that another layer, or another call, has left behind"):
        program_of(model)


def test_two_layers_that_read_a_leaf_differently_are_both_named():
    def scale(p, x, par):
        return par.psum((up(p, x, par) @ p["down"].T) * p["g"], "tp")

    model = model_of(scale, {"g": param(6), **MLP}, after=[("add", "body.g", lambda p, x, par: x + p)])
    with pytest.raises(MissingCollective, match=r"(?s)body\.g.*\(layer 'add'.*\(layer 'body'"):
        program_of(model)


def test_a_summed_parameter_that_meets_split_data_in_a_later_layer_is_refused_there():
    def first(p, x, par):
        return {"x": x, "s": par.psum(p["s"].sum(), "tp")}

    def later(p, x, par):
        return par.psum((par.pvary(x["x"], "tp") @ p["up"].T @ p["down"].T) * x["s"], "tp")

    model = model_of(first, {"s": param(6, dims="ffn"), **MLP}, after=[("later", "body", later)])
    with pytest.raises(MissingCollective, match=r"layer 'later'.*gathered or summed from parameters"):
        program_of(model)


def test_a_leaf_whose_debts_depend_on_the_number_of_rows_is_refused_by_the_step():
    def fn(p, x, par):
        partial = up(p, x, par) @ p["down"].T
        return par.psum(partial * p["g"], "tp") if len(x) > 1 else par.psum(partial, "tp") * p["g"]

    with pytest.raises(
        ModelError, match=r"body\.g owes a sum over ep\+dp\+tp for microbatches of x \[4, 6, 6\].*ep\+dp by the plan"
    ):
        judge(model_of(fn, {"g": param(6), **MLP}), fp.Mesh(tp=2))
