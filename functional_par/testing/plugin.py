"""For ``pytest -p functional_par.testing.plugin --pyargs functional_par.testing``: the profiles of hypothesis, and an option
for the model that the suite is run on.
"""

import os
import sys

import pytest

from functional_par.testing import profiles

MODEL = "FUNCTIONAL_PAR_MODEL"
"""Environment variable with what ``--model`` says; it reaches the workers of xdist."""

profiles.register()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--model``."""
    parser.getgroup("functional_par").addoption(
        "--model",
        metavar="MODULE:NAME",
        help="run functional_par.testing on this fp.Model, function that makes one, or suite, instead of on models drawn",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let the suite see the option, and the module be found from where pytest was called."""
    if name := config.getoption("--model"):
        os.environ[MODEL] = name
        sys.path.insert(0, str(config.invocation_params.dir))
