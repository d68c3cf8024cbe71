"""The table of a job's states."""

import pytest

from resile_scheduler.core.state.lifecycle import TRANSITIONS, IllegalStep, Step, advance
from resile_shared.messages.jobs import JobState


def test_every_state_has_its_row() -> None:
    assert set(TRANSITIONS) == set(JobState)


def test_nothing_follows_a_final_state_and_something_every_other() -> None:
    for state, steps in TRANSITIONS.items():
        assert (not steps) == state.is_final


def test_every_state_can_be_reached_and_every_job_can_end() -> None:
    def reachable(state: JobState) -> set[JobState]:
        seen, new = set(), {state}
        while new:
            seen |= new
            new = {after for one in new for after in TRANSITIONS[one].values()} - seen
        return seen

    assert reachable(JobState.ACCEPTED) == set(JobState)
    for state in JobState:
        assert any(after.is_final for after in reachable(state))


def test_a_usual_life() -> None:
    state = JobState.ACCEPTED
    for step, after in [
        (Step.ENQUEUE, JobState.QUEUED),
        (Step.START, JobState.STARTING),
        (Step.SETTLE, JobState.RUNNING),
        (Step.RESCALE, JobState.RESCALING),
        (Step.SETTLE, JobState.RUNNING),
        (Step.PAUSE, JobState.PAUSED),
        (Step.RESUME, JobState.QUEUED),
    ]:
        state = advance(state, step)
        assert state is after


def test_an_illegal_step_is_our_fault_and_says_so() -> None:
    with pytest.raises(IllegalStep, match="a job that is completed cannot start: this is a fault in the scheduler"):
        advance(JobState.COMPLETED, Step.START)
