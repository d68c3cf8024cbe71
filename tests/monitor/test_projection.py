"""What is shown of jobs and hosts follows from what is stored and said, in whatever order it comes."""

from hypothesis import given
from hypothesis import strategies as st

from resile_monitor.projection import Projection
from resile_shared.http.api import JobView
from resile_shared.messages.datasets import Dataset
from resile_shared.messages.hosts import HostState, WorkerExit
from resile_shared.messages.jobs import JobRecord, JobState
from resile_shared.messages.message import at
from resile_shared.messages.reports import BatchStep, CheckpointSaved, Failed, Report, Warned

from .examples import COMPLETED, beat, host, item, job, progress, report, worker


def shown(record: JobRecord, *reports: Report) -> JobView:
    projection = Projection()
    for each in reports:
        projection.report(each)
    projection.store_job(record.job, record, revision=1)
    return projection.job(record, record.unpublished)


def reported(iteration: int, time: float, **fields: object) -> Report:
    return report(progress(iteration, **fields)).model_copy(update={"time": at(time)})


def test_a_running_job_is_shown_as_its_newest_progress_has_it() -> None:
    view = shown(job(), report(progress(1)), report(progress(400, loss=0.25, metrics={"accuracy": 0.9})))
    assert (view.iteration, view.iterations_total, view.loss, view.metrics) == (400, 1000, 0.25, {"accuracy": 0.9})
    assert (view.workers, view.slots, view.generation) == (2, ("host-1/0", "host-1/1"), 1)
    assert (view.iteration_seconds, view.seconds_left) == (0.5, 300.0)
    assert (view.name, view.args, view.max_workers, view.epochs, view.bits) == (
        "digits",
        ("--fast",),
        8,
        5,
        "same bits",
    )
    assert (view.reason, view.params_sha256, view.ledger) == ("fair share with job-2", None, ())


def test_the_time_that_is_left_follows_the_average_of_the_generation() -> None:
    since, newest = reported(20, 11.0), reported(100, 51.0, iteration_seconds=9.0)
    view = shown(job(), since, newest)  # 80 iterations in 40 seconds
    assert (view.iteration_seconds, view.seconds_left) == (9.0, 450.0)


def test_the_time_that_is_left_is_measured_on_the_clock_of_one_host() -> None:
    slow = job(allocation=item(1, generation=1, iteration=0).model_copy(update={"time": at(-3600.0)}))
    assert shown(slow, reported(20, 11.0), reported(100, 51.0)).seconds_left == 450.0
    other = reported(100, 3651.0).model_copy(update={"host": "host-2"})
    assert shown(job(), reported(20, 11.0), other).seconds_left == 450.0, "as its newest iteration took"


def test_a_job_is_expected_to_meet_its_deadline_if_it_has_the_time_that_is_left() -> None:
    reports = reported(20, 11.0), reported(100, 51.0)  # 450 seconds are left

    def meets(deadline: float, **changes: object) -> bool | None:
        record = job(**changes)
        spec = record.spec.model_copy(update={"deadline": at(deadline)})
        return shown(record.model_copy(update={"spec": spec}), *reports).meets_deadline

    assert shown(job(), *reports).meets_deadline is None
    assert (meets(502.0), meets(500.0)) == (True, False)
    assert meets(502.0, state=JobState.QUEUED) is None, "nobody knows when it will train"
    ended = {"state": JobState.COMPLETED, "completed": COMPLETED, "ended": at(600.0)}
    assert (meets(600.0, **ended), meets(599.0, **ended)) == (True, False)
    assert meets(700.0, state=JobState.FAILED, ended=at(600.0)) is False


@given(st.permutations([report(progress(n), generation=g) for g in (1, 2) for n in (1, 50, 90)]))
def test_late_progress_moves_nothing_back(reports: list[Report]) -> None:
    assert shown(job(generation=2), *reports).iteration == 90


def test_a_job_that_resumes_from_a_checkpoint_goes_back() -> None:
    resumed = job(generation=2, allocation=item(2, generation=2, iteration=60))
    assert shown(resumed, report(progress(90))).iteration == 60
    assert shown(resumed, report(progress(61), generation=2), report(progress(90))).iteration == 61


def test_a_job_without_reports_is_shown_as_its_history_has_it() -> None:
    view = shown(job(allocation=item(2, generation=1, iteration=7)))
    assert (view.iteration, view.loss, view.iteration_seconds, view.seconds_left) == (7, None, None, None)
    accepted = shown(job(state=JobState.ACCEPTED, allocation=None, generation=0, ready=None))
    assert (accepted.workers, accepted.iteration, accepted.iterations_total, accepted.bits) == (0, 0, None, None)


def test_nothing_is_promised_of_the_bits_of_a_job_that_failed() -> None:
    assert shown(job(), report(progress(90))).bits == "same bits"
    assert shown(job(state=JobState.STOPPED), report(progress(90))).bits == "same bits"
    assert shown(job(state=JobState.FAILED), report(progress(90))).bits is None


def test_a_job_that_does_not_train_has_no_workers() -> None:
    for state in (JobState.QUEUED, JobState.PAUSED, JobState.FAILED, JobState.STOPPED):
        view = shown(job(state=state), report(progress(10)))
        assert (view.workers, view.slots, view.seconds_left, view.iteration) == (0, (), None, 10)


def test_how_many_iterations_there_are_follows_a_batch_that_changes() -> None:
    assert shown(job(), report(progress(400, iterations_total=700))).iterations_total == 700
    batches = (BatchStep(iteration=0, batch_size=64), BatchStep(iteration=400, batch_size=128))
    completed = COMPLETED.model_copy(update={"batches": batches, "iteration": 690})
    view = shown(job(state=JobState.COMPLETED, completed=completed), report(progress(600, iterations_total=700)))
    assert (view.iteration, view.iterations_total, view.batches) == (690, 690, batches)


def test_a_completed_job_is_shown_as_it_ended() -> None:
    view = shown(job(state=JobState.COMPLETED, completed=COMPLETED), report(progress(999)))
    assert (view.iteration, view.samples_seen, view.loss, view.epoch) == (1000, 8985, 0.1, 4)
    assert (view.validation, view.params_sha256, view.ledger) == ({"accuracy": 0.97}, "ab" * 32, COMPLETED.ledger)
    assert view.seconds_left is None


def test_a_failed_job_shows_the_newest_traceback_and_others_none() -> None:
    failures = [report(Failed(message="a", details=details)) for details in ("old", "new")]
    assert shown(job(state=JobState.FAILED), *failures).details == "new"
    assert shown(job(), *failures).details == ""


def test_the_traceback_of_a_worker_that_could_not_report_comes_from_its_agent() -> None:
    projection = Projection()
    record = job(state=JobState.FAILED)
    projection.beat(beat(worker(state="gone", exit=WorkerExit(kind="exited", status=1, details="Traceback"))))
    assert projection.job(record, ()).details == "Traceback"


def test_warnings_and_the_checkpoint_are_shown_once() -> None:
    warning = report(Warned(message="careful"))
    view = shown(job(checkpoint=CheckpointSaved(lineage=1, iteration=50, num_bytes=9)), warning, warning)
    assert (view.warnings, view.checkpoint) == (("careful",), 50)


def test_jobs_are_listed_in_the_order_of_their_submission() -> None:
    projection = Projection()
    for name, seconds in (("c", 1.0), ("b", 3.0), ("a", 2.0)):
        projection.store_job(name, job(name, submitted=at(seconds)), revision=1)
    assert [view.id for view in projection.jobs().jobs] == ["c", "a", "b"]


def test_a_record_of_an_older_revision_changes_nothing() -> None:
    projection = Projection()
    projection.store_job("job-1", job(priority=7000), revision=5)
    projection.store_job("job-1", job(), revision=4)
    record = projection.record("job-1")
    assert record is not None
    assert record.priority == 7000
    projection.store_job("job-1", None, revision=6)
    assert projection.record("job-1") is None
    assert projection.jobs().jobs == ()


def slots(projection: Projection) -> list[tuple[str | None, int | None, str | None]]:
    view = projection.host("host-1")
    assert view is not None
    return [(slot.job, slot.worker, slot.worker_state) for slot in view.slots]


def test_a_host_shows_what_runs_on_each_slot() -> None:
    projection = Projection()
    projection.store_host("host-1", host(), revision=1)
    assert slots(projection) == [(None, None, None), (None, None, None)]
    projection.store_job("job-1", job(), revision=1)
    assert slots(projection) == [("job-1", None, None), ("job-1", None, None)]  # not heard yet
    projection.beat(beat(worker(0), worker(1, state="gone"), number=2))
    assert slots(projection) == [("job-1", 0, "member"), (None, None, None)]
    projection.beat(beat(number=1))
    assert slots(projection) == [("job-1", 0, "member"), (None, None, None)]  # that beat was late


def test_what_another_incarnation_says_is_not_shown() -> None:
    projection = Projection()
    projection.beat(beat(worker(0)))
    projection.store_host("host-1", host(incarnation=2), revision=1)
    assert slots(projection) == [(None, None, None), (None, None, None)]
    projection.beat(beat(worker(1), incarnation=2))
    assert slots(projection) == [(None, None, None), ("job-1", 1, "member")]


def test_nothing_runs_on_a_host_that_is_lost() -> None:
    projection = Projection()
    projection.store_job("job-1", job(), revision=1)
    projection.beat(beat(worker(0)))
    projection.store_host("host-1", host(state=HostState.LOST, reason="silent"), revision=1)
    assert slots(projection) == [(None, None, None), (None, None, None)]


def test_all_that_was_chosen_at_the_submission_is_shown_but_the_values_of_variables() -> None:
    """Each field of a spec, also one that is added later, is shown apart or among the settings."""
    dataset = Dataset(name="mnist", uri="s3://data/mnist", version="0" * 64, num_files=1, num_bytes=5)
    chosen = {
        "env": {"TOKEN": "secret", "B": "1"},
        "requirements": ("einops>=0.8", "x @ git+https://me:secret@host.org/x"),
        "data": (dataset,),
        "mounts": ("/data/a",),
        "sizes": (1, 2, 4),
        "placement": "spread",
        "group": "gpu=h200",
        "restartable": True,
    }
    view = shown(job().model_copy(update={"spec": job().spec.model_copy(update=chosen)}))
    assert view.settings == {
        "env": "TOKEN, B",
        "requirements": "einops>=0.8, x @ git+https://***@host.org/x",
        "data": "mnist",
        "mounts": "/data/a",
        "sizes": "1, 2, 4",
        "placement": "spread",
        "group": "gpu=h200",
        "restartable": "yes",
    }
    assert "secret" not in view.model_dump_json()
    assert shown(job()).settings == {}
