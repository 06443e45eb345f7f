"""Pipelines: schedules as data, their proof and simulation, and their execution."""

from functional_par.pipeline.costs import Costs
from functional_par.pipeline.greedy import greedy
from functional_par.pipeline.recording import Recording
from functional_par.pipeline.schedule import Action, Schedule
from functional_par.pipeline.schedule_file import read_schedule, write_schedule
from functional_par.pipeline.schedules import make_schedule, schedule_names
from functional_par.pipeline.simulate import Simulation, simulate
from functional_par.pipeline.timeline import Span, Timeline
from functional_par.pipeline.verify import Proof, verify

__all__ = [
    "Action",
    "Costs",
    "Proof",
    "Recording",
    "Schedule",
    "Simulation",
    "Span",
    "Timeline",
    "greedy",
    "make_schedule",
    "read_schedule",
    "schedule_names",
    "simulate",
    "verify",
    "write_schedule",
]
