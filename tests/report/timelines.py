"""Timelines drawn up by hand, for the tests of their pictures."""

from functional_par.pipeline.schedule import Action
from functional_par.pipeline.timeline import Span, Timeline


def timeline(ranks, text, unit=""):
    """From words ``rank:action:start:end``."""
    spans = []
    for word in text.split():
        rank, action, start, end = word.split(":")
        spans.append(Span(int(rank), Action.parse(action), float(start), float(end)))
    return Timeline(ranks, tuple(spans), unit)


TWO = timeline(2, "0:0F0:0:1 0:0F1:1:2 0:0B0:4:6 0:0B1:7:9 1:1F0:1:2 1:1B0:2:4 1:1F1:4:5 1:1B1:5:7")
"""1f1b with two ranks, two microbatches, and backwards that take twice as long."""

CHUNKS = timeline(
    2, "0:0F0:0:1 0:2F0:2:3 0:2I0:4:5 0:2W0:5:6 0:0B0:7:9 1:1F0:1:2 1:3F0:3:3.5 1:3B0:3.5:4 1:1I0:5:6 1:1W0:6:7"
)
"""Two ranks with two stages each."""
