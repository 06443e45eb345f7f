"""Errors name the line of the author of the layer, however it is reached."""

import copy
import functools
import linecache

import pytest
import torch

import functional_par as fp
from functional_par.errors import MissingCollective, ModelError
from functional_par.trace.place import Place
from tests.trace.harness import FIELDS, enter, model_of, param, program_of, total
from tests.trace.programs import MLP, down


def line_of(marker):
    """The line of this file that ends in a marker."""
    lines = linecache.getlines(__file__)
    return f"trace/test_place.py:{1 + next(i for i, line in enumerate(lines) if line.rstrip().endswith('# ' + marker))}"


def helper(x, w):
    return x @ w.T  # helper


def deep(x, w):
    return sum(helper(x, w) for _ in range(1))


def test_a_helper_of_the_users_file_is_the_line():
    with pytest.raises(MissingCollective, match=line_of("helper")):
        program_of(model_of(lambda p, x, par: down(p, deep(x, p["up"]), par), MLP))


def test_a_lambda_is_a_line():
    fn = lambda p, x, par: down(p, x @ p["up"].T, par)  # noqa: E731 # lambda
    with pytest.raises(MissingCollective, match=line_of("lambda")):
        program_of(model_of(fn, MLP))


class Block:
    def __call__(self, p, x, par):
        return down(p, x @ p["up"].T, par)  # method


def test_an_object_is_named_by_the_line_of_its_method():
    with pytest.raises(MissingCollective, match=line_of("method")):
        program_of(model_of(Block(), MLP))


def decorated(fn):
    @functools.wraps(fn)
    def inner(*args):
        return fn(*args)

    return inner


@pytest.mark.parametrize("wrap", [decorated, functools.partial, lambda fn: functools.partial(decorated(fn))])
def test_the_line_of_a_loss_is_that_of_the_function_inside_its_wrappers(wrap):
    def loss(p, x, par):  # definition
        return x.sum().detach(), 1

    with pytest.raises(ModelError, match=line_of("definition")):
        program_of(model_of(lambda p, x, par: x * p["g"], {"g": param(6)}, wrap(loss)))


def test_an_exception_inside_a_helper_is_told_with_its_line_and_its_text():
    def fails(x):
        raise RuntimeError("no such thing")  # raises

    with pytest.raises(
        ModelError, match=rf"layer 'body' failed.*{line_of('raises')}.*RuntimeError: no such thing"
    ) as caught:
        program_of(model_of(lambda p, x, par: fails(x), {}))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_exception_of_torch_is_told_with_the_line_that_called_it():
    def fn(p, x, par):
        return torch.cat([x, x[0]])  # torch

    with pytest.raises(ModelError, match=rf"{line_of('torch')}.*RuntimeError"):
        program_of(model_of(fn, {}))


def test_an_error_of_a_brick_is_told_with_the_line_that_called_it():
    def fn(p, x, par):
        return fp.nn.column_linear(x, p["up"][:, :3], par)  # brick

    with pytest.raises(
        ModelError, match=rf"layer 'body', {line_of('brick')} \(in fp.nn.column_linear\).*the input ends in"
    ):
        program_of(model_of(fn, MLP))


@pytest.mark.parametrize("file", ["<stdin>", "<ipython-input-3-abc>", "/tmp/ipykernel_7/99.py", "<string>"])
def test_lines_of_notebooks_and_prompts_are_lines(file):
    source = "def fn(p, x, par):\n    h = x @ p['up'].T\n    return par.psum(h @ p['down'].T, 'tp')\n"
    scope = {}
    exec(compile(source, file, "exec"), scope)
    name = file.removeprefix("/tmp/")
    with pytest.raises(MissingCollective, match=f"layer 'body', {name}:2"):
        program_of(model_of(scope["fn"], MLP))


def test_a_package_whose_name_begins_like_torch_is_a_users_file():
    site = torch.__file__.rsplit("/", 2)[0]
    source = "def fn(p, x, par):\n    return par.psum(x @ p['up'].T @ p['down'].T, 'tp')\n"
    scope = {}
    exec(compile(source, f"{site}/torchtitan/model.py", "exec"), scope)
    with pytest.raises(MissingCollective, match=r"torchtitan/model\.py:2"):
        program_of(model_of(scope["fn"], MLP))


def test_a_function_that_pythons_library_calls_is_the_users():
    def fn(p, x, par):
        return functools.reduce(lambda y, w: down(p, y @ p[w].T, par), ["up"], x)  # reduce

    with pytest.raises(MissingCollective, match=line_of("reduce")):
        program_of(model_of(fn, MLP))


def test_pythons_library_is_not_the_line():
    def fn(p, x, par):
        return copy.copy(x)  # copy

    with pytest.raises(ModelError, match=line_of("copy")):
        program_of(model_of(fn, MLP))


def test_an_output_that_is_at_fault_is_told_with_the_line_of_the_layer():
    def fn(p, x, par):  # layer
        return x.as_subclass(type("Named", (torch.Tensor,), {}))

    with pytest.raises(ModelError, match=line_of("layer")):
        program_of(model_of(fn, {}))


def test_a_builtin_has_no_line():
    assert Place.of_function(len) is None
    with pytest.raises(ModelError, match="layer 'body' failed while it was traced"):
        program_of(
            fp.Model({"enter": {"w": param(6, 6)}}, [("enter", "enter", enter), ("body", "enter", max)], total, FIELDS)
        )
