from functional_par.errors import ScheduleError
from functional_par.pipeline.schedule import Action, Schedule


def canonical(n):
    n = n.lower()
    if n not in ("afab", "1f1b"):
        raise ScheduleError(f"unknown schedule {n}")
    return n


def chunks_of(n, c):
    return 1


def make_schedule(name, p, m, chunks=None):
    if name == "afab":
        w = [m] * p
    else:
        w = [min(m, p - s - 1) for s in range(p)]
    rows = []
    for s in range(p):
        row = [Action(s, "F", i) for i in range(w[s])]
        for i in range(w[s], m):
            row += [Action(s, "F", i), Action(s, "B", i - w[s])]
        row += [Action(s, "B", i) for i in range(m - w[s], m)]
        rows.append(tuple(row))
    return Schedule(name, tuple(rows))


def verify(*a, **k):
    pass


def read_schedule(p):
    raise NotImplementedError
