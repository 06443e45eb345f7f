"""The parts of ``examples/benchmark.py``: the contenders, the race in which they take turns, and what is made of its times."""
