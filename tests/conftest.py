"""One thread an operation (the ranks are the parallelism), and a profile of hypothesis for CI and one for the night."""

import inspect
import os
import signal

import pytest
import torch
from hypothesis import Phase, settings

from functional_par.testing import profiles

pytest_plugins = ["tests.raises"]  # after a whole run: the error messages that no test matches
profiles.register()
# A failure is enough there; its smallest example would take minutes.
unshrunk = {"phases": [Phase.explicit, Phase.generate], "report_multiple_bugs": False}
settings.register_profile("mutation", settings.get_profile("ci"), **unshrunk)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
torch.set_num_threads(1)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background, by a shell that lets its jobs ignore Ctrl-C: tests that interrupt a run need it heard.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked deep run only when asked for with ``-m deep``."""
    if "deep" not in config.getoption("markexpr"):
        deselected = [item for item in items if item.get_closest_marker("deep")]
        items[:] = [item for item in items if not item.get_closest_marker("deep")]
        config.hook.pytest_deselected(items=deselected)


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Names of tests that are the same in every process: no addresses, no order of sets."""
    if isinstance(val, (set, frozenset)):
        return "+".join(sorted(map(str, val))) or "none"
    if inspect.isroutine(val):
        return str(val.__name__)
    return None
