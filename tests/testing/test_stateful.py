"""Training in a drawn sequence of layouts and options, weights and moments carried or gathered and loaded from each to the
next, is after every step what torch's AdamW does to the plain function in one process.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import functional_par as fp
from functional_par import tree
from functional_par.buckets import slices
from functional_par.run_par import RunPar, step_key
from functional_par.shards import parameter_slices
from functional_par.testing import Layout, Sample, strategies
from functional_par.testing.free import free_model
from functional_par.testing.history import join
from tests.oracle import BETAS, DECAY, EPS, close

SEED, CLIP = 7, 0.4
TIE = fp.tie("head", "embed")


def rate(step):
    """A learning rate that shows when a step is counted twice or forgotten."""
    return 1e-2 / (1 + step)


def drop(p, x, par):
    """Random numbers that follow from the seed, the step and the row."""
    return fp.nn.dropout(x, 0.25, par, "drop")


def make_model():
    """Tied over the first and last stage, cut over tp in places and owing tp in others, with a frozen leaf and dropout."""
    free = free_model(["rms norm", "partial scale", "dense"], vocab=5, width=3, frozen="dense2")
    layers = [*free.layers[:2], ("drop", [], drop), *free.layers[2:]]
    return fp.Model(free.params, layers, free.loss, free.batch)


MODEL = make_model()
LAYOUTS = strategies.layouts(MODEL, TIE, max_ranks=4)


@functools.cache
def tied():
    return fp.compose(TIE)(MODEL).model


@dataclass(frozen=True)
class Leg:
    """Some steps in one layout.

    Attributes:
        layout, donate: how.
        samples: a batch a step.
        carried: the states of the leg before are used as they are, since the shards are the same; else they are gathered
            and loaded.
    """

    layout: Layout
    donate: bool
    samples: tuple[Sample, ...]
    carried: bool = False


@st.composite
def journeys(draw):
    legs = []
    for i in range(draw(st.integers(2, 3))):
        carried = i > 0 and draw(st.booleans())
        layout = draw(LAYOUTS)
        if carried:
            before = legs[-1].layout
            # Two positions: sequences are split over two ranks.
            mode = layout.mode if before.mesh.tp <= 2 else "ALL_REDUCE"
            if before.zero:  # where a leaf is cut in slices depends on what it owes, and so on the mode
                mode = before.mode
            layout = replace(layout, mesh=before.mesh, split=before.split, mode=mode, zero=before.zero)
        rows = layout.pieces * draw(st.integers(1, 2))
        batches = draw(st.lists(strategies.samples(MODEL, rows, layout.pieces), min_size=1, max_size=2))
        legs.append(Leg(layout, draw(st.booleans()), tuple(batches), carried))
    return legs


def alone(samples):
    """Weights and moments after each step of torch's AdamW, in one process."""
    model = tied()
    params = {path: x.clone() for path, x in tree.flatten(model.init(SEED, torch.float64)).items()}
    moving = {path: x for path, x in params.items() if model.leaves[path].trainable}
    optimizer = torch.optim.AdamW(list(moving.values()), 0.0, BETAS, EPS, weight_decay=DECAY, foreach=False)
    for step, sample in enumerate(samples):
        batch = sample.batch(MODEL)
        leaves = {path: x.detach().requires_grad_(path in moving) for path, x in params.items()}
        loss = model(tree.unflatten(leaves), batch, RunPar(batch=batch, key=step_key(SEED, step)))
        grads = torch.autograd.grad(loss, [leaves[path] for path in moving], allow_unused=True, materialize_grads=True)
        norm = math.sqrt(sum(grad.square().sum().item() for grad in grads))
        for leaf, grad in zip(moving.values(), grads, strict=True):
            leaf.grad = grad * min(1.0, CLIP / (norm + 1e-6))
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
        slots = {
            name: {path: optimizer.state[x][name].clone() for path, x in moving.items()}
            for name in ("exp_avg", "exp_avg_sq")
        }
        yield loss.item(), norm, {path: x.clone() for path, x in params.items()}, slots


def travel(leg, states, whole):
    """Take the steps of a leg. Returns per rank: metrics and shards after each step, the state, the gathered trees."""
    program = leg.layout.program(MODEL, TIE)
    batches = [sample.batch(MODEL) for sample in leg.samples]

    def main(world):
        step = program.step(
            world,
            fp.optim.adamw(rate, BETAS, EPS, DECAY),
            CLIP,
            donate=leg.donate,
            dtype=torch.float64,
            engine=leg.layout.engine,
        )
        if leg.carried:
            state = states[world.rank]
        else:
            state = step.init(SEED) if whole is None else step.load(*whole[:2], step=whole[2], seed=SEED)
        trail = []
        for batch in batches:
            state, metrics = step(state, batch)
            slots = {name: {path: x.clone() for path, x in flat.items()} for name, flat in state.flat_opt.items()}
            trail.append((metrics, {path: x.clone() for path, x in state.flat.items()}, slots))
        return trail, state, (step.gather(state), step.gather_opt(state), state.step)

    return program.plan(leg.layout.mesh), fp.run(main, leg.layout.mesh, backend="threads", timeout=60.0)


@settings(max_examples=max(1, settings.default.max_examples // 3))
@given(journeys())
def test_a_journey_through_layouts_is_one_training(legs):
    truth = alone([sample for leg in legs for sample in leg.samples])
    states, whole = None, None
    for leg in legs:
        plan, results = travel(leg, states, whole)
        trails, states, gathered = zip(*results, strict=True)
        for ranks in zip(*trails, strict=True):
            check_step(plan, ranks, *next(truth))
        check_gathered(plan, states, gathered)
        whole = gathered[0]


def check_step(plan, ranks, loss, norm, params, slots):
    metrics, flats, opts = zip(*ranks, strict=True)
    assert all(other == metrics[0] for other in metrics)
    for name, value in (("loss", loss), ("grad_norm", norm)):
        close(torch.tensor(metrics[0][name], dtype=torch.float64), torch.tensor(value, dtype=torch.float64), name)
    copies = []
    held, own = slices_of(plan)
    found = {"parameter": join(plan, flats, held, "parameter", copies)}
    found |= {name: join(plan, [opt[name] for opt in opts], own, name, copies) for name in slots}
    assert not copies
    for kind, leaves in {"parameter": params, **slots}.items():
        assert found[kind].keys() == leaves.keys()
        for path, leaf in leaves.items():
            close(found[kind][path], leaf, f"{kind} {path}")


def slices_of(plan):
    """For each rank, the slices of parameters and of slots that it holds."""
    return tuple([of(plan, rank) for rank in range(plan.mesh.size)] for of in (parameter_slices, slices))


def check_gathered(plan, states, gathered):
    """Every rank has gathered the same whole trees, which are what the shards make, under all names of a tie."""
    held, own = slices_of(plan)
    for params, opt, step in gathered:
        assert step == states[0].step
        assert torch.equal(params["head"], params["embed"])
        for shards, cut, tree_ in [
            ([state.flat for state in states], held, params),
            *(([state.flat_opt[name] for state in states], own, opt[name]) for name in opt),
        ]:
            whole, flat = join(plan, shards, cut, "", []), tree.flatten(tree_)
            assert {plan.aliases.get(path, path) for path in flat} == set(whole)
            for path, leaf in flat.items():
                assert torch.equal(leaf, whole[plan.aliases.get(path, path)]), path


def test_journeys_carry_states_move_them_and_give_them_away():
    seen = []

    @settings(max_examples=300, database=None, phases=[Phase.generate])
    @given(journeys())
    def collect(legs):
        seen.extend(zip([None, *legs], legs, strict=False))

    collect()
    pairs = [(a, b) for a, b in seen if a is not None and a.samples and b.samples]
    assert any(b.carried and a.layout.mode != b.layout.mode for a, b in pairs)
    assert any(b.carried and a.layout.schedule != b.layout.schedule for a, b in pairs if a.layout.mesh.pp > 1)
    assert any(not b.carried and a.layout.mesh.tp == 2 and b.layout.mesh.pp > 1 for a, b in pairs)
    assert any(a.donate and not b.donate for a, b in pairs)
