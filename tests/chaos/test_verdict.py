"""A promise that breaks is found in what a pool tells, and named; what an attack and a restart do to a job is none."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from resile.chaos.attacks import Attack, AttackKind, Target, TargetKind
from resile.chaos.members import Saved
from resile.chaos.observation import Commit, Observations
from resile.chaos.recovery_watch import InjectedAttack, PartRecovery, checkpoint_recovery_time, job_recovery_time
from resile.chaos.report import percentile, recovery_times, skipped
from resile.chaos.verdict import (
    CampaignRecord,
    Outcome,
    Skipped,
    ended_by_signals,
    faults,
    oversubscribed,
    slots_with_two_workers,
    stands_still,
    stored_sha256,
)
from resile.pool.worker_processes import RunningWorker
from resile_learner.training.digest import params_sha256
from resile_shared.http.api import JobView
from resile_shared.messages.jobs import HistoryItem, JobEvent, JobState
from resile_shared.messages.reports import EpochCount

from ..sdk.api_server import job_view

SHA = "a" * 64
ONCE = EpochCount(epoch=0, samples=96, once=96, more=0, never=0)


def item(number: int, kind: str = "allocation", **changes: Any) -> HistoryItem:
    fields = {"generation": number, "workers": 1, "slots": ("host-1/0",), "iteration": 10 * number}
    return HistoryItem.model_validate(
        {"number": number, "time": datetime.fromtimestamp(number, UTC), "kind": kind, **fields, **changes}
    )


HISTORY = (item(1), item(2), item(3, "completed"))
RECOVERED = Outcome(
    1, InjectedAttack(Attack(AttackKind.KILL, Target(TargetKind.BUS)), since=1.0, until=1.0), [PartRecovery("bus", 2.0)]
)


def completed(job: str = "job-1", history: tuple[HistoryItem, ...] = HISTORY, **changes: Any) -> JobView:
    fields = {"state": JobState.COMPLETED, "params_sha256": SHA, "ledger": (ONCE,), "history": history}
    return job_view(job, **{**fields, **changes})


def events(job: JobView) -> list[JobEvent]:
    told = {"job": job.id, "name": job.name, "tenant": "default", "state": job.state, "priority": 5000}
    return [JobEvent.model_validate({**told, "item": entry}) for entry in job.history]


def found(*jobs: JobView, published: list[JobEvent] | None = None, **seen: Any) -> list[str]:
    """The faults of a campaign in which ``jobs`` were accepted, and ended so."""
    told = [event for job in jobs for event in events(job)] if published is None else published
    observations = Observations(events=told)
    for name, values in seen.items():
        getattr(observations, name).update(values)
    return list(faults(CampaignRecord([job.id for job in jobs], jobs, observations, [RECOVERED], SHA)))


def test_a_job_that_ended_as_if_undisturbed_has_no_fault() -> None:
    assert found(completed(), commits={"job-1": [Commit(1.0, 1, 5, 0.5, 60)]}) == []


def test_a_job_that_starts_again_from_a_checkpoint_has_no_fault() -> None:
    again = (item(1), item(2, iteration=40), item(3, "queued", slots=()), item(4, iteration=20), item(5, "completed"))
    commits = [Commit(1.0, 2, 41, 0.5, 500), Commit(2.0, 4, 41, 0.5, 500)]
    assert found(completed(history=again), commits={"job-1": commits}) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"params_sha256": "b" * 64}, "an undisturbed run"),
        ({"ledger": (ONCE.model_copy(update={"once": 95, "never": 1}),)}, "every sample once"),
        ({"ledger": ()}, "none is counted"),
        ({"state": JobState.FAILED}, "failed instead of completed"),
        ({"history": (item(1), item(2, generation=1), item(3, "completed"))}, "generation 1 took effect after 1"),
        ({"history": (item(1), item(2, iteration=9), item(3, "completed"))}, "began at iteration 9"),
    ],
)
def test_a_job_that_ended_otherwise_is_named(changes: dict[str, Any], fault: str) -> None:
    (told,) = found(completed(**changes))
    assert fault in told


def test_an_accepted_job_that_is_not_there_is_lost() -> None:
    record = CampaignRecord(["job-1"], [], Observations(), [RECOVERED], SHA)
    assert list(faults(record)) == ["job-1 was accepted, and is lost"]


@pytest.mark.parametrize("numbers", [(1, 3), (1, 2, 2, 3), (2, 1, 3)])
def test_an_item_that_is_published_twice_or_never_is_found(numbers: tuple[int, ...]) -> None:
    job = completed()
    published = [events(job)[number - 1] for number in numbers]
    assert any("its events have the numbers" in fault for fault in found(job, published=published))


def test_a_slot_that_two_jobs_hold_is_found() -> None:
    assert any("host-1/0 is held by job-1, job-2" in fault for fault in found(completed(), completed("job-2")))


def test_a_host_with_more_workers_than_slots_is_found() -> None:
    here = [RunningWorker("job-1", 1, "host-1", 71), RunningWorker("job-2", 4, "host-1", 72)]
    assert not list(oversubscribed(here, {"host-1": 2}))
    (fault,) = oversubscribed(here, {"host-1": 1})
    assert "job-1/1 (process 71), job-2/4 (process 72)" in fault


def test_two_commits_of_one_iteration_that_differ_are_found() -> None:
    commits = [Commit(1.0, 2, 41, 0.5, 500), Commit(2.0, 3, 41, 0.6, 500)]
    (fault,) = found(completed(), commits={"job-1": commits})
    assert "iteration 41 has loss 0.5" in fault


@pytest.mark.parametrize(("numbers", "fault"), [([4, 5, 7], "a gap"), ([4, 5, 5], "or twice"), ([4, 6, 5], "a gap")])
def test_a_stream_with_a_gap_or_a_double_is_found(numbers: list[int], fault: str) -> None:
    assert any(fault in told for told in found(completed(), sequences={"pool": numbers}))


def test_an_attack_that_nobody_recovered_from_is_found() -> None:
    injected = InjectedAttack(Attack(AttackKind.KILL, Target(TargetKind.BUS)), since=1.0, until=1.0)
    record = CampaignRecord([], [], Observations(), [Outcome(7, injected, [PartRecovery("bus", None)])], SHA)
    assert list(faults(record)) == ["attack 7, kill bus: bus had not recovered after 120 s"]


def seen(*commits: Commit) -> Observations:
    told = Observations(members={("job-1", 1): frozenset({0, 1}), ("job-1", 2): frozenset({0})})
    told.commits["job-1"] += commits
    return told


def test_a_job_goes_on_with_the_first_iteration_without_the_victims() -> None:
    told = seen(Commit(4.0, 1, 1, None, 0), Commit(6.0, 1, 2, None, 0), Commit(7.0, 2, 3, None, 0))
    assert job_recovery_time(told, "job-1", frozenset({1}), since=5.0, until=5.0) == 7.0
    assert job_recovery_time(told, "job-1", frozenset({0}), since=5.0, until=5.0) is None


def test_a_frozen_worker_may_go_on_with_the_others_when_it_is_let_go() -> None:
    told = seen(Commit(6.0, 1, 2, None, 0), Commit(9.0, 1, 3, None, 0))
    assert job_recovery_time(told, "job-1", frozenset({1}), since=5.0, until=8.0) == 9.0


def test_a_job_that_has_trained_to_its_end_needs_nobody() -> None:
    told = seen(Commit(4.0, 1, 1, None, 0))
    told.completed["job-1"] = 4.5
    assert job_recovery_time(told, "job-1", frozenset({1}), since=5.0, until=5.0) == 5.0
    assert checkpoint_recovery_time(told, "job-1", until=5.0) == 5.0


def test_a_job_that_was_stopped_needs_nobody() -> None:
    told = seen(Commit(4.0, 1, 1, None, 0))
    assert job_recovery_time(told, "job-1", frozenset({1}), since=5.0, until=5.0) is None
    told.stopped["job-1"] = 6.0
    assert job_recovery_time(told, "job-1", frozenset({1}), since=5.0, until=5.0) == 6.0
    assert checkpoint_recovery_time(told, "job-1", until=7.0) == 7.0


def test_a_storage_has_recovered_with_the_first_checkpoint_after_the_attack() -> None:
    told = Observations()
    told.checkpoints["job-1"] += [Saved(4.0, 40), Saved(6.0, 60), Saved(7.0, 70)]
    assert checkpoint_recovery_time(told, "job-1", until=5.0) == 6.0
    assert checkpoint_recovery_time(told, "job-1", until=8.0) is None


def test_recovery_times_are_told_by_kind_of_attack_and_what_recovers() -> None:
    injected = InjectedAttack(
        Attack(AttackKind.KILL, Target(TargetKind.HOST, "host-1")), 1.0, 1.0, workers={"job-1": frozenset({1})}
    )
    outcomes = [Outcome(n, injected, [PartRecovery("job-1", float(n)), PartRecovery("host-1", 9.0)]) for n in (1, 2, 3)]
    host, job = recovery_times(outcomes)
    assert (host["attack"], host["part"], host["count"], host["median_seconds"]) == ("kill host", "host", 3, 9.0)
    assert (job["part"], job["median_seconds"], job["p99_seconds"]) == ("job", 2.0, 3.0)
    assert percentile([float(n) for n in range(1, 101)], 0.99) == 99.0


def test_a_model_that_is_stored_and_is_not_the_one_of_the_completion_is_found() -> None:
    job = completed()
    record = CampaignRecord(
        [job.id], [job], Observations(events=events(job)), [RECOVERED], SHA, models={job.id: "b" * 64}
    )
    assert list(faults(record)) == [f"the stored model of job-1 has sha256 {'b' * 64}, its completion says {SHA}"]


def test_the_sha256_of_a_stored_model_is_computed_from_its_file_alone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(torch.float64)
    model[0] = model[0].to(torch.bfloat16)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert stored_sha256(tmp_path / "model.safetensors") == params_sha256(model)


def test_a_start_from_the_beginning_beside_a_checkpoint_is_found() -> None:
    again = (item(1, iteration=0), item(2, "queued", slots=()), item(3, iteration=0), item(4, "completed"))
    assert any("started from the beginning" in f for f in found(completed(history=again), checkpoints=saved_at(1.5)))
    assert not found(completed(history=again), checkpoints=saved_at(2.5))


def saved_at(time: float) -> dict[str, list[Saved]]:
    return {"job-1": [Saved(time, 40)]}


def test_a_job_that_gets_no_further_stands_still_unless_it_is_paused() -> None:
    commits = [Commit(1.0, 1, 40, 0.5, 60), Commit(100.0, 1, 40, 0.5, 60), Commit(200.0, 1, 41, 0.5, 61)]
    (fault,) = stands_still("job-1", commits, [])
    assert fault == "job-1 stood still at iteration 40 for 199 s"
    assert not list(stands_still("job-1", commits, [(50.0, 150.0)]))


LOG = """2026-01-02T03:04:05.678Z info    learner: starting agent host=host-1 incarnation=1 slots=2
2026-01-02T03:04:06.000Z info    learner: starting worker job=job-1 worker=0 slot=0 [trace 1]
2026-01-02T03:04:06.000Z info    learner: starting worker job=job-1 worker=1 slot=1
2026-01-02T03:04:09.000Z info    learner: worker exited job=job-1 worker=0: worker 0 left
2026-01-02T03:04:10.000Z info    learner: starting worker job=job-2 worker=0 slot=0
"""


def test_two_workers_on_one_slot_are_found_at_every_moment() -> None:
    assert not list(slots_with_two_workers("host-1", LOG))
    again = "2026-01-02T03:05:00.000Z info    learner: starting worker job=job-2 worker=1 slot=1\n"
    (fault,) = slots_with_two_workers("host-1", LOG + again)
    assert fault == "host-1/1: worker 1 of job-2 was started at 2026-01-02T03:05:00.000Z, worker 1 of job-1 lives"
    incarnation = "2026-01-02T03:04:30.000Z info    learner: starting agent host=host-1 incarnation=2 slots=2\n"
    assert not list(slots_with_two_workers("host-1", LOG + incarnation + again))


def test_a_worker_that_ends_at_a_signal_to_all_is_found() -> None:
    ended = "2026-01-02T03:05:00.000Z info    learner: worker exited job=job-2 worker=1: worker 1 was killed by "
    assert not list(ended_by_signals("host-1", f"{ended}SIGKILL (Killed)\n"))
    (fault,) = ended_by_signals("host-1", f"{ended}SIGTERM (Terminated)\n")
    assert fault == "host-1: worker 1 of job-2 ended by SIGTERM at 2026-01-02T03:05:00.000Z"


def test_a_torn_checkpoint_is_found_unless_it_was_damaged_on_purpose() -> None:
    corrupt = Attack(AttackKind.CORRUPT, Target(TargetKind.OBJECT_STORE, "job-1"))
    outcome = Outcome(1, InjectedAttack(corrupt, 1.0, 1.0, damaged=40), [])
    record = CampaignRecord([], [], Observations(), [outcome], SHA, torn={("job-1", 40), ("job-1", 80)})
    assert list(faults(record)) == [
        "job-1: the checkpoint of iteration 80 was seen with a manifest and without all its parts"
    ]


def test_a_request_without_effect_is_found_and_a_job_that_was_stopped_need_not_complete() -> None:
    stop = Attack(AttackKind.STOP, Target(TargetKind.JOB, "job-1"))
    outcome = Outcome(1, InjectedAttack(stop, 1.0, 1.0), [PartRecovery("stop job-1", None)])
    job = completed(state=JobState.STOPPED, params_sha256=None, ledger=(), history=(item(1), item(2, "stopped")))
    record = CampaignRecord(["job-1"], [job], Observations(events=events(job)), [outcome], SHA)
    assert list(faults(record)) == ["attack 1, stop job job-1: stop job-1 had not recovered after 120 s"]


def test_attacks_that_could_not_be_carried_out_are_counted() -> None:
    left = (Skipped("pause job", "it has completed"), Skipped("pause job", "it is over"), Skipped("kill job", "none"))
    record = CampaignRecord([], [], Observations(), [], SHA, skipped=left)
    _, *rows = skipped(record)
    assert rows == [("kill job", "1", "none"), ("pause job", "2", "it is over")]
    assert list(faults(record)) == ["no attack was carried out: no promise was tested"]
