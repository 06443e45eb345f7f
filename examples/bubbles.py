"""How much of a pipeline is idle: measured beside simulated, for every schedule.

python examples/bubbles.py                     # real matrix products, one thread a rank, as many ranks as there are cores
python examples/bubbles.py --ranks 2 3 4 --virtual   # more ranks than cores: a clock that the costs move

A real run takes the median of some steps. The simulation is given what every action took in that very step, so what is compared
is the waiting, not the speed of the machine.
"""

import argparse
import os
import statistics

import torch
from rich.console import Console
from rich.table import Table

import functional_par as fp
from functional_par.pipeline import Costs, Recording, make_schedule, schedule_names, simulate
from functional_par.testing.virtual_clock import Stamps, VirtualRecording, VirtualWorld


def model(layers, width, rows):
    """Layers of equal work, a matrix product each."""

    def first(p, batch, par):
        return fp.nn.column_linear(batch["x"], p, par)

    def layer(p, x, par):
        return fp.nn.column_linear(x, p, par)

    def loss(p, x, par):
        return x.square().mean(), torch.tensor(len(x))

    weight = fp.Param((width, width), "out in", fp.init.normal(width**-0.5))
    names = [f"layer{i}" for i in range(layers)]
    return fp.Model(
        dict.fromkeys(names, weight),
        [(name, name, first if i == 0 else layer) for i, name in enumerate(names)],
        loss,
        {"x": fp.Input((None, rows, width), torch.float32)},
    )


class Measured(Costs):
    """What every single action took."""

    def __init__(self, timeline):
        super().__init__()
        object.__setattr__(self, "taken", {span.action: span.end - span.start for span in timeline.spans})

    def of(self, action):
        return self.taken[action]


def measured(program, ranks, batch, steps):
    """The timelines of some steps on ranks that are threads, after one that warms up."""

    def main(world):
        step = program.step(world, fp.optim.sgd(lr=1e-6), donate=True, engine="tape")
        state, found = step.init(0), []
        for i in range(steps + 1):
            recording = Recording(times=True)
            state, _ = step(state, batch, recording)
            if i:
                found.append(recording.timeline(world))
        return found

    return fp.run(main, fp.Mesh(pp=ranks), backend="threads")[0]


def virtual(program, ranks, batch, costs):
    """The timeline of one step on a clock that the costs move."""
    stamps = Stamps()

    def main(world):
        recording = VirtualRecording(costs)
        step = program.step(VirtualWorld(world, recording, stamps), fp.optim.sgd(lr=1e-3), engine="tape")
        step(step.init(0), batch, recording)
        return recording.timeline(world)

    return fp.run(main, fp.Mesh(pp=ranks), backend="threads")[0]


def row(name, ranks, options):
    """Bubbles of one schedule: measured and simulated, with the live activations of both."""
    m = options.microbatches
    schedule = make_schedule(name, ranks, m)
    program = fp.compose(fp.stage_pp(name, m))(model(schedule.stages * options.layers, options.width, options.rows))
    batch = {"x": torch.randn(m, options.rows, options.width)}
    if options.virtual:
        costs = Costs(1.0, 1.0, 1.0, options.transfer)
        return virtual(program, ranks, batch, costs).bubble, simulate(schedule, costs).bubble
    pairs = [
        (timeline.bubble, simulate(schedule, Measured(timeline)).bubble)
        for timeline in measured(program, ranks, batch, options.steps)
    ]
    return statistics.median(real for real, _ in pairs), statistics.median(ideal for _, ideal in pairs)


def main(argv=None):
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[cores], help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedules", nargs="+", default=list(schedule_names()))
    parser.add_argument("--width", type=int, default=1024, help="of the matrices")
    parser.add_argument("--rows", type=int, default=512, help="of a microbatch")
    parser.add_argument("--layers", type=int, default=3, help="a stage")
    parser.add_argument("--steps", type=int, default=3, help="measured steps")
    parser.add_argument("--virtual", action="store_true", help="every action takes one unit, whatever it took")
    parser.add_argument("--transfer", type=float, default=0.0, help="of a message, with --virtual")
    options = parser.parse_args(argv)
    torch.set_num_threads(max(options.ranks))  # shared out among the ranks: one each
    table = Table("ranks", "schedule", "measured", "simulated", "measured / simulated")
    for ranks in options.ranks:
        for name in options.schedules:
            real, ideal = row(name, ranks, options)
            table.add_row(str(ranks), name, f"{real:.1%}", f"{ideal:.1%}", f"{real / ideal:.3f}" if ideal else "-")
    Console().print(table)


if __name__ == "__main__":
    main()
