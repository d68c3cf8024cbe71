"""What is elastic computes what plain PyTorch computes, or names what differs before the second iteration."""

import pytest

from .fidelity.outcome import DIFFERS, FALSE_ALARM, NAMED_LATE, draws, outcomes
from .fidelity.situation import SITUATIONS
from .fidelity.table import FILE, row, row_in

FAULTS = {"two_optimizers": {"shard"}}
"""The ways in which a situation is silently another, named late, or equal and warned of.

In this one each optimizer has a loss of its own, so that it makes no difference that the body runs once for each.
"""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SITUATIONS)
def test_a_situation_is_what_it_is_in_plain_pytorch_or_is_named(name: str) -> None:
    situation = SITUATIONS[name]
    assert draws(situation) == situation.is_random
    found = outcomes(situation)
    faults = {way for way, outcome in found.items() if outcome.startswith((DIFFERS, NAMED_LATE, FALSE_ALARM))}
    assert faults == FAULTS.get(name, set())
    assert row(name, found) == row_in(FILE.read_text(), name), "run `python -m tests.learner.fidelity`"


def test_the_table_has_no_other_situations() -> None:
    rows = [line for line in FILE.read_text().splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in rows] == list(SITUATIONS)
