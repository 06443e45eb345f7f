"""How many examples a property takes. None is shrunk: what is drawn is small, and each try takes as long as a test."""

from hypothesis import Phase, settings


def few(least: int, share: float) -> settings:
    """A share of the examples of the profile, and at least so many."""
    n = max(least, int(settings.default.max_examples * share))
    return settings(max_examples=n, phases=(Phase.explicit, Phase.reuse, Phase.generate))
