"""Every mutant and every hole still applies."""

import importlib.util
from pathlib import Path

import pytest

from .holes import HOLES, Hole
from .mutants import MUTANTS
from .mutation import Mutant, mutated


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies(mutant: Mutant) -> None:
    compile(mutant.source(), mutant.module, "exec")


@pytest.mark.parametrize("hole", HOLES, ids=lambda hole: hole.name)
def test_a_hole_applies_with_all_its_mutants_at_once(hole: Hole) -> None:
    for module in {mutant.module for mutant in hole.mutants}:
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        mine = [mutant for mutant in hole.mutants if mutant.module == module]
        compile(mutated(Path(spec.origin).read_text(), mine), module, "exec")


def test_there_are_enough_of_them_and_each_has_a_name_of_its_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
    assert len({hole.name for hole in HOLES}) == len(HOLES)
