"""The history of slots holds what events say, each once, in a bounded size."""

from typing import Any

import pytest

from resile_monitor.history import slot_history
from resile_monitor.history.slot_history import JobHistory, PoolHistory, slots_held, slots_view
from resile_shared.messages.hosts import HostDraining, HostJoined, HostLost, Slot
from resile_shared.messages.jobs import HistoryItem, JobEvent, JobState
from resile_shared.messages.message import at
from resile_shared.messages.pool import PolicyEvent
from resile_shared.messages.slot_history import MAX_JOB_MARKS, MAX_POOL_MARKS
from resile_shared.policies import PolicyName

from .examples import job


def change(number: int, workers: int, *, name: str = "job-1", **changes: Any) -> JobEvent:
    item = HistoryItem(
        number=number, time=at(number), kind="allocation", generation=1, workers=workers, iteration=number
    )
    event = JobEvent(job=name, name="digits", tenant="default", state=JobState.RUNNING, priority=7000, item=item)
    kind = changes.pop("kind", "allocation")
    return event.model_copy(update={"item": item.model_copy(update={"kind": kind}), **changes})


def policy(number: int) -> PolicyEvent:
    return PolicyEvent(number=number, time=at(number), policy=PolicyName.PRIORITY, preemption=True)


def test_an_event_that_is_handled_again_changes_nothing() -> None:
    job_history, pool = JobHistory(), PoolHistory()
    for history in (job_history, pool):
        events = [change(1, 2), change(2, 3)]
        for sequence, event in enumerate(events, start=1):
            assert history.add(event, time=1000 * sequence, sequence=sequence)
        before = (history.held.times[:], history.held.values[:], history.marks[:], history.sequence)
        for sequence, event in enumerate(events, start=1):
            assert not history.add(event, time=1000 * sequence, sequence=sequence)
        assert (history.held.times, history.held.values, history.marks, history.sequence) == before


def test_what_is_stored_is_never_of_an_earlier_event_than_it_includes() -> None:
    history = JobHistory()
    history.add(change(1, 2), time=1000, sequence=7)
    assert history.message(sequence=3).sequence == 7
    assert history.message(sequence=9).sequence == 9


def test_marks_are_bounded_and_the_submission_stays() -> None:
    history, pool = JobHistory(), PoolHistory()
    for number in range(1, MAX_JOB_MARKS + 50):
        kind = "accepted" if number == 1 else "priority"
        history.add(change(number, 0, kind=kind, priority=number), time=1000 * number, sequence=number)
    assert len(history.marks) == MAX_JOB_MARKS
    assert history.marks[0].kind == "submitted"
    assert history.marks[-1].text == str(MAX_JOB_MARKS + 49)
    for number in range(1, MAX_POOL_MARKS + 50):
        pool.add(policy(number), time=1000 * number, sequence=number)
    assert (len(pool.marks), pool.marks[0].time) == (MAX_POOL_MARKS, 50_000)
    assert history.message(sequence=1)
    assert pool.message()


def test_the_jobs_that_hold_slots_are_bounded_and_what_is_left_out_is_in_no_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slot_history, "MAX_PRESENT", 2)
    pool = PoolHistory()
    for number in (1, 2, 3):
        pool.add(change(1, 4, name=f"job-{number}"), time=1000 * number, sequence=number)
    assert (len(pool.holding), pool.held.last) == (2, 8)
    for number in (1, 2, 3):
        pool.add(change(2, 0, name=f"job-{number}"), time=1000 * (3 + number), sequence=3 + number)
    assert (pool.holding, pool.held.last) == ({}, 0)


def test_the_newest_time_does_not_go_back_with_a_clock() -> None:
    pool = PoolHistory()
    pool.add(change(1, 4), time=9000, sequence=1)
    pool.add(change(2, 3), time=5000, sequence=2)
    assert (pool.newest, pool.held.last) == (9000, 3)


@pytest.mark.parametrize("state", [JobState.COMPLETED, JobState.FAILED, JobState.QUEUED, JobState.PAUSED])
def test_a_job_that_has_ended_or_waits_holds_no_slots_whatever_its_item_says(state: JobState) -> None:
    assert slots_held(change(3, 4, state=state)) == 0
    assert slots_held(change(3, 4)) == 4


def test_a_host_that_is_draining_keeps_its_slots() -> None:
    pool = PoolHistory()
    slots = (Slot(index=0), Slot(index=1))
    pool.add(HostJoined(host="host-1", incarnation=1, time=at(1), slots=slots), time=1000, sequence=1)
    pool.add(HostDraining(host="host-1", incarnation=1, time=at(2), reason="repair"), time=2000, sequence=2)
    assert (pool.slots.last, pool.hosts.last) == (2, 1)
    assert [mark.kind for mark in pool.marks] == ["joined", "draining"]


def test_a_host_that_returns_while_it_is_drained_has_its_slots() -> None:
    pool = PoolHistory()
    slots = (Slot(index=0), Slot(index=1))
    pool.add(HostJoined(host="host-1", incarnation=1, time=at(1), slots=slots), time=1000, sequence=1)
    pool.add(HostLost(host="host-1", incarnation=1, time=at(2)), time=2000, sequence=2)
    assert (pool.slots.last, pool.hosts.last) == (0, 0)
    pool.add(HostDraining(host="host-1", incarnation=2, time=at(3), slots=slots), time=3000, sequence=3)
    assert (pool.slots.last, pool.hosts.last) == (2, 1)


def test_a_view_shows_the_jobs_with_the_most_slots_and_the_newest_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_history, "MAX_JOBS_SHOWN", 2)
    monkeypatch.setattr(slot_history, "MAX_MARKS_SHOWN", 3)
    pool = PoolHistory()
    jobs = []
    for number in (1, 2, 3, 4):
        name, history = f"job-{number}", JobHistory()
        for each in (history, pool):
            each.add(change(1, number, name=name), time=1000 * number, sequence=number)
        jobs.append((job(name), history))
    pool.add(policy(9), time=1_000_000, sequence=5)
    view = slots_view(pool, jobs, seconds=86_400)
    assert {each.id for each in view.jobs} == {"job-3", "job-4"}
    assert [mark.about for mark in view.marks] == ["job-3", "job-4", "pool"]
