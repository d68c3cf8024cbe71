"""Every mutant still applies, and those that break the most obvious promises are noticed by the first worlds."""

import pytest

from .mutants import MUTANTS
from .mutation import Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies(mutant: Mutant) -> None:
    compile(mutant.source(), mutant.module, "exec")


def test_there_are_enough_of_them_and_each_has_a_name_of_its_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
