"""Where the forward goes wrong: the first layer whose result nothing explains, and in it the first such operation."""

from __future__ import annotations

from functional_par.audit import advice
from functional_par.audit.finding import Finding
from functional_par.audit.layout import find
from functional_par.audit.numbers import first_chunk, largest_difference
from functional_par.audit.observe import Case, Ranks, Single
from functional_par.audit.rules import RULES, Said, Scene, of_numbers
from functional_par.audit.story import Story, label
from functional_par.model import LOSS
from functional_par.trace.place import Place


def wrong_outputs(case: Case, single: Single, ranks: Ranks, layer: str) -> list[int]:
    """Positions of the results of a layer that no layout explains."""
    logs, wrong = ranks.logs[layer], []
    for i, whole in enumerate(single.logs[layer].outputs):
        grid = [[log.outputs[i] for log in parts] for parts in logs]
        if layer != LOSS:
            layout = find(whole, grid)
        else:
            layout = find(whole, grid, rows="same" if case.pieces == 1 else "sum", tp="same")
        if layout is None:
            wrong.append(i)
    return wrong


def first_wrong(case: Case, single: Single, ranks: Ranks) -> str | None:
    """Name of the first layer from which on all results are wrong: what is right again later just lay in another way."""
    found = None
    for layer in reversed(case.plan.model.all_layers):
        if not wrong_outputs(case, single, ranks, layer.name):
            return found
        found = layer.name
    return found


def diagnose(case: Case, single: Single, ranks: Ranks, layer: str) -> Finding:
    """Say what is wrong in a layer of which every operation was recorded."""
    wrong = wrong_outputs(case, single, ranks, layer)
    story = Story(single.logs[layer], ranks.logs[layer])
    floats, integers = story.roots(wrong)
    for index in integers:
        moment = story.moment(index)
        if moment is not None and first_chunk(moment.whole, moment.grid):
            return _told(case, story, index, layer)
    for index in (*floats, *integers):
        return _told(case, story, index, layer)
    whole = single.logs[layer].outputs[wrong[0]]
    grid = [[log.outputs[wrong[0]] for log in parts] for parts in ranks.logs[layer]]
    said = of_numbers(case, whole, grid) or Said("differs", "Its result is not that of one process.", advice.DIFFERS)
    return make_finding(case, layer, said, largest_difference(whole, grid))


def make_finding(case: Case, layer: str, said: Said, largest: float, place: str = "", what: str = "value") -> Finding:
    """A finding about a layer of the plan."""
    plan = case.plan
    fn = next((each.fn for each in plan.model.all_layers if each.name == layer), None)
    also = tuple(each.name for each in plan.model.layers if each.fn is fn and each.name != layer)
    place = place or str((fn and Place.of_function(fn)) or "")
    text = f"The {said.text[4:]}" if said.text.startswith("the ") else said.text
    return Finding(
        kind=said.kind,
        what=what,
        text=text,
        advice=said.advice,
        layer=layer,
        stage=plan.stage_of.get(layer),
        place=place,
        axis=said.axis,
        ratio=said.ratio,
        largest=largest,
        also=also,
    )


def _told(case: Case, story: Story, index: int, layer: str) -> Finding:
    at = story.moment(index)
    assert at is not None, "an operation without a counterpart cannot be a root"
    inputs = tuple(moment for _, moment in story.inputs(index))
    own = {label(moment.node, at.node.place): moment.whole for moment in inputs}
    scene = Scene(case, at, inputs, own | story.floats_before(index))
    for rule in RULES:
        if (said := rule(scene)) is not None:
            break
    else:
        said = Said("differs", f"{scene.called} gives other numbers than in one process.", advice.DIFFERS)
    return make_finding(case, layer, said, largest_difference(at.whole, at.grid), str(at.node.place))
