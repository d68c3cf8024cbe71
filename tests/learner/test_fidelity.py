"""What is elastic computes what plain PyTorch computes, or names what differs before the second iteration."""

import pytest

from .fidelity.outcome import DIFFERS, NAMED_LATE, draws, outcomes
from .fidelity.situation import SITUATIONS
from .fidelity.table import FILE, row, row_in

LOOPS_OF_SHARDS = (
    *("scaled_by_mean", "batch_norm", "own_statistics", "counted_calls"),
    *("hook_of_parameters", "longest_text", "carried_state", "time_first", "last_of_one"),
)
FAULTS: dict[str, tuple[str, ...]] = {
    "batch": ("batch_norm", "two_trainings"),
    "shard": (
        *LOOPS_OF_SHARDS,
        *("accumulated", "averaged", "gan", "added_parameters", "teacher", "mixed", "standardized", "counted_classes"),
        "two_trainings",
    ),
    "ElasticLoop": LOOPS_OF_SHARDS,
    "ElasticModel": tuple(set(LOOPS_OF_SHARDS) - {"carried_state", "time_first", "last_of_one"}),
}
"""What is not named, or is named late, by the way."""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SITUATIONS)
def test_a_situation_is_what_it_is_in_plain_pytorch_or_is_named(name: str) -> None:
    situation = SITUATIONS[name]
    assert draws(situation) == situation.is_random
    found = outcomes(situation)
    faults = {way for way, outcome in found.items() if outcome.startswith((DIFFERS, NAMED_LATE))}
    assert faults == {way for way, names in FAULTS.items() if name in names}
    assert row(name, found) == row_in(FILE.read_text(), name), "run `python -m tests.learner.fidelity`"


def test_the_table_has_no_other_situations() -> None:
    rows = [line for line in FILE.read_text().splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in rows] == list(SITUATIONS)
