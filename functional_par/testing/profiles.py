"""Profiles of hypothesis for property tests that start ranks: ``ci`` takes minutes and is the same every time, ``deep`` takes
a night and is different every time. ``pytest --hypothesis-profile deep`` chooses one, once they are registered.
"""

from hypothesis import HealthCheck, settings


def register() -> None:
    """Make both known to hypothesis; for a ``conftest.py``, or by ``pytest -p functional_par.testing.plugin``."""
    slow = [HealthCheck.too_slow]
    settings.register_profile("ci", max_examples=20, deadline=None, derandomize=True, suppress_health_check=slow)
    settings.register_profile("deep", max_examples=500, deadline=None, suppress_health_check=slow)
