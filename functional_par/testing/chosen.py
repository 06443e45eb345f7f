"""Which model ``pytest --pyargs functional_par.testing`` runs the suite on."""

from __future__ import annotations

from importlib import import_module

from functional_par.errors import ConfigError
from functional_par.testing.strategies import models
from functional_par.testing.suites import default_examples, suite


def chosen(name: str) -> type:
    """The suite of the model that ``name`` says, ``"package.module:name"``, or the suite of that name, or for "" of models
    drawn; these with a tenth of the examples, since the library has tests of its own.

    Raises:
        ConfigError: if there is nothing of that name.
    """
    if not name:
        return suite(models(), max_examples=max(1, default_examples() // 10))
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise ConfigError(f"model {name!r}: give it as package.module:name, an fp.Model or a function that makes one.")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"model {name!r}: {error}.") from error
    return found if isinstance(found, type) else suite(found)
