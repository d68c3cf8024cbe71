"""A plan as text: what is wrong with it is said in one line."""

import pytest

from resile.cli.tables import batches_text
from resile.local.plan import BatchesError, PlanError, parse_batches, parse_plan
from resile_scheduler.policies.plan import PlanStep
from resile_shared.messages.reports import BatchStep


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "it is empty"),
        ("50:4", "it starts at iteration 50, not at 0"),
        ("0:1,50:4,50:2", "iteration 50 does not come after 50"),
        ("0:1,50:4,20:2", "iteration 20 does not come after 50"),
        ("0:0", "'0:0' leaves no worker"),
        ("0:-1", "'0:-1' is not a pair of whole numbers"),
        ("0:1,,50:2", "'' is not a pair of whole numbers"),
        ("0:1,50", "'50' is not a pair"),
        ("0:1:2", "'0:1:2' is not a pair"),
        ("a:b", "'a:b' is not a pair"),
        ("0:1.5", "'0:1.5' is not a pair"),
        ("0:4000", "more than 1024 workers"),
    ],
)
def test_a_malformed_plan_is_explained(text: str, fault: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan(text)
    assert fault in str(caught.value)
    assert "such as 0:1,50:4,120:3" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "it is empty"),
        ("0:64,20", "'20' is not a pair"),
        ("20:64", "it starts at iteration 20, not at 0"),
        ("0:64,20:0", "'20:0' is not a batch; a batch has at least 1 sample"),
        ("0:" + "9" * 30, "is too large"),
        (",".join(f"{n}:64" for n in range(1001)), "it has 1001 pairs, and a run has at most 1000"),
    ],
)
def test_malformed_batches_are_explained(text: str, fault: str) -> None:
    with pytest.raises(BatchesError) as caught:
        parse_batches(text)
    assert fault in str(caught.value)
    assert "such as 0:64,120:256" in str(caught.value)


def test_batches_are_read_as_they_are_shown() -> None:
    steps = (BatchStep(iteration=0, batch_size=64), BatchStep(iteration=120, batch_size=256))
    assert parse_batches(batches_text(steps)) == steps


def test_a_plan_may_have_spaces() -> None:
    assert parse_plan(" 0:1, 50 : 4 ") == (PlanStep(0, 1), PlanStep(50, 4))
