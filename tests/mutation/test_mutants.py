"""The list of mutants fits the code as it is: each edit finds its place and leaves a module that can be parsed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import functional_par

from .mutants import MUTANTS

PACKAGE = Path(functional_par.__file__).parent


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_one_edit_of_the_code_as_it_is(mutant):
    text = (PACKAGE / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    changed = text.replace(mutant.old, mutant.new)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))


def test_there_are_many_mutants_with_names_of_their_own_and_tests_that_exist():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
    root = Path(__file__).parents[2]
    assert all((root / place).exists() for mutant in MUTANTS for place in mutant.tests)
