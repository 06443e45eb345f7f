"""``remat``: which layers, and what is kept of them, are parts of the plan."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import functional_par as fp
from functional_par import CompositionError, Mesh

from ..toys import small_gpt

ALL = ("embed", "block0", "block1", "block2", "block3", "head")


def chosen(*arguments, **named):
    return fp.compose(fp.remat(*arguments, **named))(small_gpt(blocks=4)).plan(Mesh()).remat


@pytest.mark.parametrize(
    ("arguments", "layers"),
    [
        ((), dict.fromkeys(ALL[:-1], "full")),
        (("selective",), dict.fromkeys(ALL[:-1], "selective")),
        (("none",), {}),
        (("full", ["block0", "block2-3"]), dict.fromkeys(("block0", "block2", "block3"), "full")),
        (("full", "block0 block2-3 loss"), dict.fromkeys(("block0", "block2", "block3", "loss"), "full")),
        (("selective", "block*"), dict.fromkeys(ALL[1:-1], "selective")),
        (
            ({"block*": "full", "block1 head": "selective", "block2-3": "none"},),
            {"block0": "full", "block1": "selective", "head": "selective"},
        ),
        (("full", []), {}),
    ],
    ids=["default", "selective", "none", "ranges", "text", "wildcard", "mapping", "no layer"],
)
def test_layers_are_named_as_they_are_printed_or_with_wildcards(arguments, layers):
    assert chosen(*arguments) == layers


def test_it_commutes_with_the_other_transforms_and_changes_nothing_else():
    others = (fp.tie("head.weight", "embed.weight"), fp.stage_pp(microbatches=2), fp.remat("full", "block0-1"))
    model = small_gpt()
    first, second, without = (
        fp.compose(*order)(model).plan(Mesh(pp=2)) for order in (others, others[::-1], others[:2])
    )
    assert first == second != without
    assert replace(first, remat={}, costs=without.costs) == without


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ful",), "remat('ful'): what is kept of a layer is one of 'none', 'full', 'selective'."),
        (
            ({"block0": "full"}, "block1"),
            "remat({'block0': 'full'}, layers='block1'): the mapping says already which layers.",
        ),
        (("full", 3), "remat(layers=3): names of layers, such as 'block0', 'block2-5' or 'block*': a list"),
        (
            ("full", "block3-5"),
            "remat: no layer is called 'block4' (of 'block3-5'). Is it 'block3'? Layers: embed, block0",
        ),
        (("full", "blck*"), "remat: no layer is called 'blck*'. Is it 'block3'? Layers: embed, block0, block1, block2"),
        (("full", "mlp"), "remat: no layer is called 'mlp'. Layers: embed"),
    ],
    ids=["policy", "both", "number", "range", "pattern", "name"],
)
def test_what_it_cannot_be_is_refused(arguments, words):
    with pytest.raises(CompositionError, match=re.escape(words)):
        chosen(*arguments)


def test_it_is_given_once():
    with pytest.raises(CompositionError, match=re.escape("compose: remat is given 2 times; once is enough.")):
        fp.compose(fp.remat(), fp.remat("none"))


def test_a_layer_that_runs_again_is_a_third_more_work():
    without, some = (
        fp.compose(*t)(small_gpt(blocks=4)).plan(Mesh()).costs for t in ((), (fp.remat("full", "block0-1"),))
    )
    assert {name: some[name] / cost for name, cost in without.items() if some[name] != cost} == {
        "block0": pytest.approx(4 / 3, rel=1e-4),
        "block1": pytest.approx(4 / 3, rel=1e-4),
    }
    stages = {}
    for names in ("block0-3", "head"):
        program = fp.compose(fp.remat("full", names), fp.stage_pp())(fp.models.gpt(64, 8, 6, 2, 4, d_ff=8))
        stages[names] = len(program.plan(Mesh(pp=2)).stages[0])
    assert stages["block0-3"] < stages["head"]


def test_compiled_layers_have_no_products_to_keep():
    program = fp.compose(fp.remat("selective", "block1"))(small_gpt())
    words = (
        "step(engine='compile'): of layer 'block1' the matrix products are kept (remat), which are found as torch runs"
    )
    with pytest.raises(CompositionError, match=re.escape(words)):
        fp.run(lambda world: program.step(world, fp.optim.sgd(0.1), engine="compile"), Mesh(), backend="threads")
