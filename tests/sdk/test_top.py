"""`resile top` keeps its columns, whatever a reason is as long as."""

from datetime import UTC, datetime

import pytest
from rich.console import Console

from resile.cli.top import view
from resile_shared.http.api import JobSummary
from resile_shared.messages.jobs import JobState

REASON = "worker 0 on host-1/0 failed: " + "TypeError: a long story " * 20


def job(number: int, state: JobState, *, iteration: int = 0) -> JobSummary:
    return JobSummary(
        id=f"job-{number}",
        name="train",
        tenant="default",
        state=state,
        reason=REASON,
        priority=5000,
        min_workers=1,
        max_workers=8,
        workers=3,
        slots=(),
        generation=1,
        iteration=iteration,
        iterations_total=1000,
        epoch=0,
        epochs=None,
        samples_seen=0,
        loss=0.5,
        metrics={},
        validation={},
        iteration_seconds=None,
        seconds_left=None,
        submitted=datetime(2026, 1, 2, tzinfo=UTC),
        bits=None,
        params_sha256=None,
    )


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_long_reason_leaves_the_other_columns_as_they_are(width: int) -> None:
    console = Console(width=width)
    with console.capture() as shown:
        console.print(view(([job(1, JobState.RUNNING, iteration=20), job(2, JobState.FAILED)], []), url="http://pool"))
    lines = shown.get().splitlines()
    heading, first, second = lines[2:5]
    assert heading.split() == ["JOB", "STATE", "PRIORITY", "SLOTS", "ITERATION", "LOSS", "LEFT", "WHY"]
    assert first.split()[:4] == ["job-1", "running", "5000", "3"]
    assert second.split()[:4] == ["job-2", "failed", "5000", "3"]
    for column in ("STATE", "SLOTS", "ITERATION", "WHY"):
        assert first[heading.index(column) - 1] == " " != first[heading.index(column)]
    assert "worker 0" in first[heading.index("WHY") :]
    assert all(len(line) <= width for line in lines)
