"""Every exception that the library raises on purpose.

A message says what was asked, the leaf or the config key, the numbers, why, and the fix. Classes that stand for a bad
value are also ``ValueError``, so that code which knows nothing of this library can still catch them.
"""

from __future__ import annotations


class ParallelError(Exception):
    """Base class of all errors of functional_par."""


class MeshError(ParallelError, ValueError):
    """A mesh that cannot exist, or that the program or the number of processes does not fit."""


class ModelError(ParallelError, ValueError):
    """A model description that is inconsistent: a missing path, a bad shape, an impure or unreadable layer."""


class CompositionError(ParallelError, ValueError):
    """Transforms that do not fit the model or each other."""


class TraceError(ParallelError):
    """A layer function whose collectives are wrong; says which layer, which line, which axis, and what to write."""


class MissingCollective(TraceError):
    """A value that needs ``psum`` or ``pvary`` over an axis and does not get it."""


class SuperfluousCollective(TraceError):
    """A collective over an axis on which its input is already the same, or already varies."""


class ConfigError(ParallelError, ValueError):
    """A configuration file or a command-line flag with a wrong key, type or value."""


class DataError(ParallelError, ValueError):
    """Text, tokens or a batch that cannot be used."""


class ScheduleError(ParallelError, ValueError):
    """A pipeline schedule that is incomplete, out of order, or cannot finish."""


class CommError(ParallelError, RuntimeError):
    """Communication between ranks failed."""


class MismatchError(CommError):
    """Two ranks of a group entered different collectives at the same place in their programs."""


class DeadlockError(CommError):
    """A rank waits for a collective or a message that its peer will never enter."""


class RankFailedError(CommError):
    """Another rank failed; this rank stopped because of it."""


class NonFiniteError(ParallelError, ArithmeticError):
    """The loss or the gradient norm is infinite or not a number."""


class StateError(ParallelError, ValueError):
    """A training state that cannot be used: consumed by ``donate=True``, or made for another program."""
