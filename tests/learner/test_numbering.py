"""Numbers of workers remember who was here, of a bounded number of jobs."""

import pytest

from resile_learner.agent import worker_records
from resile_learner.agent.worker_records import HighestNumbers


def test_workers_up_to_the_highest_number_were_placed_here() -> None:
    highest = HighestNumbers()
    assert not highest.has_placed("job-1", 0)
    highest.record("job-1", [3, 1])
    highest.record("job-1", [])
    highest.record("job-1", [2])
    assert [highest.has_placed("job-1", number) for number in (1, 3, 4)] == [True, True, False]
    assert not highest.has_placed("job-2", 0)


def test_the_jobs_that_were_here_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_records, "MAX_JOBS", 2)
    highest = HighestNumbers()
    for job in ("job-1", "job-2", "job-1", "job-3"):
        highest.record(job, [0])
    assert [highest.has_placed(job, 0) for job in ("job-1", "job-2", "job-3")] == [True, False, True]
