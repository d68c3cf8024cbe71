"""Jobs whose workers serve: they grow and shrink like others, and have nothing to save."""

from resile_scheduler.core.events import JobChangeRequested, PoolSuspendRequested, Tick
from resile_shared.messages.commands import JobPause, JobResume
from resile_shared.messages.jobs import JobState
from resile_shared.messages.services import Service

from .test_core import Bench, gone, ready, worker


def serving(bench: Bench, *, least: int = 2, most: int = 2) -> Bench:
    """A service with its first replicas on the only host."""
    bench.submit(service=Service(class_name="Served"), min_workers=least, max_workers=most)
    begin(bench)
    return bench


def begin(bench: Bench) -> None:
    """Let the replicas of the newest generation load their class, and the first report that they serve."""
    placements = bench.newest().placements
    bench.beat(*(worker(p.worker, p.slot) for p in placements))
    for placement in placements:
        bench.report(ready(num_shards=1000), worker=placement.worker, generation=bench.newest().generation)
    bench.beat(*(worker(p.worker, p.slot, state="ready") for p in placements))
    bench.switch(iteration=bench.newest().generation)


def state(bench: Bench) -> JobState:
    return bench.records["job-1"].state


def test_a_service_is_bound_to_no_class_of_device() -> None:
    bench = serving(Bench(4))
    assert (state(bench), len(bench.newest().placements)) == (JobState.RUNNING, 2)
    assert bench.records["job-1"].device_class == ""


def test_a_pause_saves_nothing_and_takes_effect_at_once() -> None:
    bench = serving(Bench(4))
    workers = [p.worker for p in bench.newest().placements]
    bench.tell(JobChangeRequested("pause", JobPause(job_id="job-1")))
    assert state(bench) is JobState.PAUSED
    assert bench.newest().placements == ()
    bench.beat(*(gone(number, slot, kind="killed") for slot, number in enumerate(workers)))
    bench.tell(JobChangeRequested("resume", JobResume(job_id="job-1")))
    begin(bench)
    assert state(bench) is JobState.RUNNING


def test_a_pool_that_stops_does_not_wait_for_a_service() -> None:
    bench = serving(Bench(4))
    bench.tell_once(PoolSuspendRequested("suspend", epoch=1))
    assert state(bench) is JobState.QUEUED


def test_a_service_that_loses_all_its_replicas_starts_with_new_ones() -> None:
    bench = serving(Bench(4))
    workers = [p.worker for p in bench.newest().placements]
    bench.beat(*(gone(number, slot, kind="killed") for slot, number in enumerate(workers)))
    bench.now += 60.0
    bench.tell(Tick())
    losses = [item.loss for item in bench.histories["job-1"] if item.loss]
    assert [loss.restart for loss in losses] == ["with new replicas"]
    begin(bench)
    assert state(bench) is JobState.RUNNING
