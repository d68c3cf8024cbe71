"""What a pool keeps is bounded by what is alive and by what it was told to keep, however long it runs."""

import time
from dataclasses import dataclass
from random import Random

import pytest

from resile_scheduler.core import retention
from resile_scheduler.core.events import JobChangeRequested, JobNotStored, JobRemoved, RemoveJob, Reply, Tick
from resile_scheduler.core.retention import Limits
from resile_scheduler.simulation.simulated_pool import SimulatedPool
from resile_scheduler.simulation.training import Sharded
from resile_scheduler.simulation.workload import Submission
from resile_shared.messages.commands import Accepted, JobDelete, JobStop, Refused
from resile_shared.messages.hosts import HostState
from resile_shared.messages.jobs import JobSpec, JobState

from .sizes import num_elements
from .test_core import Bench, gone, result, worker

KEEP_JOBS = 20
DAY = 86400.0


def submission(number: int, *, at: float, iterations: int = 2, package: str = "packages/1") -> Submission:
    spec = JobSpec(name="short", package=package, script="train.py", max_workers=2)
    return Submission(at, f"job-{number}", spec, Sharded(iterations, num_shards=2))


def ended(sim: SimulatedPool) -> set[str]:
    return {job for job, record in sim.records.items() if record.state.is_final and not record.is_deleted}


def pool(*, keep_jobs: int = KEEP_JOBS, keep_days: float = 1.0) -> SimulatedPool:
    sim = SimulatedPool(limits=Limits(keep_jobs, keep_days))
    sim.add_host("host-0", 4)
    return sim


def train(sim: SimulatedPool, *numbers: int, package: str = "packages/1") -> None:
    """Have these jobs trained to their end."""
    sim.submit(submission(number, at=sim.now - sim.start + 0.1, package=package) for number in numbers)
    for _ in range(40):
        sim.run(until=sim.now - sim.start + 1.0)
        sim.send_heartbeats()


def delete(sim: SimulatedPool, job: str) -> Accepted | Refused:
    [reply] = [c for c in sim.handle(JobChangeRequested("delete", JobDelete(job_id=job))) if isinstance(c, Reply)]
    return reply.answer


def test_the_newest_jobs_that_ended_are_kept() -> None:
    sim = pool(keep_jobs=3)
    train(sim, 1, 2)
    train(sim, 3, 4, 5)
    assert set(sim.records) == {"job-3", "job-4", "job-5"}


def test_what_a_job_has_made_stays_unless_somebody_deletes_the_job() -> None:
    sim = pool(keep_jobs=1)
    train(sim, 1, 2)
    delete(sim, "job-2")
    sim.run(until=sim.now - sim.start)
    assert {(removal.job, removal.keeps_results) for removal in sim.removals} == {("job-1", True), ("job-2", False)}


def test_a_new_scheduler_removes_no_job_before_it_knows_that_no_worker_of_it_is_alive() -> None:
    bench = Bench(1, 1)
    bench.submit(max_workers=1)
    bench.beat(worker(0))
    bench.tell(JobChangeRequested("stop", JobStop(job_id="job-1")))
    bench.tell_once(JobChangeRequested("delete", JobDelete(job_id="job-1")))
    removal = RemoveJob("job-1", "packages/1")
    assert removal not in bench.restart(), "no host has said yet what it runs"
    assert removal not in bench.beat(host="host-2")
    assert removal not in bench.beat(worker(0))
    assert removal in bench.beat(gone(0, kind="killed"))


def test_jobs_that_ended_long_ago_are_removed() -> None:
    sim = pool(keep_days=2.0)
    train(sim, 1)
    sim.now += 1.5 * DAY
    train(sim, 2)
    assert set(sim.records) == {"job-1", "job-2"}
    sim.now += DAY
    sim.send_heartbeats()
    sim.run(until=sim.now - sim.start)
    assert set(sim.records) == {"job-2"}


def test_a_job_is_deleted_when_it_has_ended_and_its_number_never_comes_again() -> None:
    sim = pool()
    sim.submit([submission(1, at=0.0, iterations=10_000)])
    sim.run(until=5.0)
    refused = delete(sim, "job-1")
    assert isinstance(refused, Refused)
    assert refused.reason == "job job-1 is running: stop it first (`resile stop job-1`)"
    train(sim, 2, 3)
    assert isinstance(delete(sim, "job-3"), Accepted)
    sim.run(until=sim.now - sim.start)
    assert set(sim.records) == {"job-1", "job-2"}
    assert isinstance(again := delete(sim, "job-3"), Refused)
    assert again.code == "unknown"
    sim.restart_scheduler()
    assert sim.scheduler._pool.last_number == 3


def test_a_job_is_removed_only_once_its_workers_are_gone() -> None:
    """A worker that is being ended may still write to storage."""
    sim = pool()
    sim.submit([submission(1, at=0.0, iterations=10_000)])
    sim.run(until=5.0)
    assert sim.alive("job-1")
    sim.handle(JobChangeRequested("stop", JobStop(job_id="job-1")))
    commands = sim.handle(JobChangeRequested("delete", JobDelete(job_id="job-1")))
    assert not [command for command in commands if isinstance(command, RemoveJob)]
    assert "job-1" in sim.records
    sim.run(until=sim.now - sim.start + 1.0)
    assert not sim.records


def test_a_job_that_is_removed_is_stored_no_more_though_the_bus_refused_its_record() -> None:
    bench = Bench(1)
    bench.submit()
    bench.activate()
    bench.report(result(), generation=1)
    bench.beat(gone(0, kind="finished"))
    bench.tell_once(JobChangeRequested("delete", JobDelete(job_id="job-1")))
    refused = JobNotStored("job-1", "it is too large")
    assert bench.tell(refused) == []
    bench.tell(JobRemoved("job-1"))
    assert bench.tell(refused) == []


def test_a_removal_that_a_crash_interrupts_is_gone_on_with() -> None:
    sim = pool()
    train(sim, 1)
    sim.records["job-1"] = sim.records["job-1"].model_copy(update={"is_deleted": True})
    sim.restart_scheduler()
    sim.send_heartbeats()
    sim.run(until=sim.now - sim.start)
    assert not sim.records


def test_a_limit_that_is_lowered_removes_jobs_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may concern thousands of jobs, and the scheduler has other things to do."""
    monkeypatch.setattr(retention, "MAX_LEAVING", 3)
    sim = pool(keep_jobs=100)
    train(sim, 1, 2, 3, 4, 5, 6, 7, 8)
    sim._limits = Limits(1, 1.0)
    sim.restart_scheduler()
    sim.send_heartbeats()
    removed = [len(sim.removals)]
    for _ in range(4):
        sim.handle(Tick())
        removed.append(len(sim.removals))
        sim.run(until=sim.now - sim.start)
    assert removed == [3, 3, 6, 7, 7], "the next are deleted when those before are gone"
    assert set(sim.records) == {"job-8"}


def test_a_package_is_removed_with_the_last_job_that_used_it() -> None:
    sim = pool()
    train(sim, 1, 2, package="packages/shared")
    train(sim, 3, package="packages/own")
    removals = [
        RemoveJob("job-1", "packages/shared", is_package_used=True),
        RemoveJob("job-3", "packages/own"),
        RemoveJob("job-2", "packages/shared"),
    ]
    for removal in removals:
        commands = sim.handle(JobChangeRequested(f"delete {removal.job}", JobDelete(job_id=removal.job)))
        assert [command for command in commands if isinstance(command, RemoveJob)] == [removal]
        sim.run(until=sim.now - sim.start)


def test_a_package_stays_while_a_deleted_job_that_has_it_still_has_workers() -> None:
    sim = pool()
    train(sim, 1, package="packages/shared")
    sim.submit([submission(2, at=sim.now - sim.start, iterations=10_000, package="packages/shared")])
    sim.run(until=sim.now - sim.start + 5.0)
    assert sim.alive("job-2")
    sim.handle(JobChangeRequested("stop", JobStop(job_id="job-2")))
    delete(sim, "job-2")
    delete(sim, "job-1")
    sim.run(until=sim.now - sim.start + 5.0)
    assert [(removal.job, removal.is_package_used) for removal in sim.removals] == [("job-1", True), ("job-2", False)]


def test_of_jobs_that_are_removed_at_once_the_last_one_removes_the_package() -> None:
    """Until then it shows that the storage is the one that has them."""
    sim = pool(keep_jobs=1)
    train(sim, 1, 2, 3, package="packages/shared")
    train(sim, 4, package="packages/own")
    sim.run(until=sim.now - sim.start)
    removed = [(removal.job, removal.is_package_used) for removal in sim.removals]
    assert removed == [("job-1", True), ("job-2", True), ("job-3", False)]


@dataclass(frozen=True)
class Size:
    """What a pool holds at one moment."""

    jobs_so_far: int
    in_core: int
    stored_bytes: int
    restart_seconds: float


def measure(sim: SimulatedPool, num_jobs: int, restart_seconds: float) -> Size:
    stored = [*sim.records.values(), *sim.hosts.values(), *(item for h in sim.histories.values() for item in h)]
    num_bytes = sum(len(message.model_dump_json()) for message in stored)
    return Size(num_jobs, num_elements(sim.scheduler), num_bytes, restart_seconds)


def restart(sim: SimulatedPool) -> float:
    """Restart the scheduler; return how long that takes in seconds."""
    begun = time.perf_counter()
    sim.restart_scheduler()
    return time.perf_counter() - begun


@pytest.mark.parametrize("num_rounds", [20, pytest.param(100, marks=[pytest.mark.nightly], id="5000 jobs")])
def test_jobs_hosts_and_schedulers_that_come_and_go_leave_nothing_behind(num_rounds: int) -> None:
    """In each round 50 jobs and 2 hosts come and go: none is lost.

    The scheduler restarts twice in each round of the first half, and once at the very end.
    """
    random = Random(7)
    sim = pool()
    completed: set[str] = set()
    sizes: list[Size] = []
    for number in range(num_rounds):
        hosts = [f"host-{2 * number + 1}", f"host-{2 * number + 2}"]
        for host in hosts:
            sim.add_host(host, 4)
        jobs = range(50 * number + 1, 50 * number + 51)
        sim.submit(submission(job, at=sim.now - sim.start + random.uniform(0.0, 40.0)) for job in jobs)
        seconds = 0.0
        for second in range(60):
            sim.now += 1.0
            sim.run(until=sim.now - sim.start)
            sim.send_heartbeats()
            completed |= {name for name, record in sim.records.items() if record.state is JobState.COMPLETED}
            if number < num_rounds // 2 and second in (20, 40):
                seconds = restart(sim)
        for host in hosts:
            sim.change_host(host, HostState.LEFT)
            sim.remove_host(host)
        sizes.append(measure(sim, len(completed), seconds))
    at_end = measure(sim, len(completed), restart(sim))
    for size in (*sizes[:: max(1, num_rounds // 10)], at_end):
        print(size)
    assert len(completed) == 50 * num_rounds
    assert len(ended(sim)) == KEEP_JOBS
    assert set(sim.scheduler._pool.hosts) == {"host-0"}
    assert at_end.in_core <= max(size.in_core for size in sizes), "a new scheduler finds no more than the last one held"
    assert max(size.in_core for size in sizes[1:]) < 2.0 * min(size.in_core for size in sizes[1:])
    assert max(size.stored_bytes for size in sizes[1:]) < 1.5 * min(size.stored_bytes for size in sizes[1:])
