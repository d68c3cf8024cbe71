"""A fork server that dies counts against the jobs that had workers on it, and one of them fails when it goes on."""

from resile_scheduler.core.events import Tick
from resile_scheduler.core.losses.fork_server_deaths import FORGET_SECONDS, MAX_DEATHS, REASON
from resile_shared.messages.hosts import Heartbeat, HostState, WorkerReport
from resile_shared.messages.jobs import JobState

from .test_core import Bench, gone, worker


class Deaths:
    """A pool of one host whose fork server dies and comes back."""

    def __init__(self, num_slots: int = 4) -> None:
        self.bench = Bench(num_slots)
        self.incarnation = 1

    def beat(self, *reports: WorkerReport) -> None:
        self.bench.beats += 1
        self.bench.tell(
            Heartbeat(host="host-1", incarnation=self.incarnation, number=self.bench.beats, workers=reports)
        )

    def running(self) -> list[WorkerReport]:
        newest = {allocation.job: allocation for allocation in self.bench.allocations}
        placed = [(job, p) for job, allocation in newest.items() for p in allocation.placements]
        return [worker(p.worker, p.slot, job=job) for job, p in placed]

    def die(self) -> None:
        """Start all jobs; then the fork server dies, and one worker after the other is listed as gone."""
        jobs = {record.job for record in self.bench.records.values() if not record.state.is_final}
        while {report.job for report in self.running()} != jobs:
            self.bench.now += 1  # a start that follows others without progress waits a while
            self.bench.tell(Tick())
        running = self.running()
        self.beat(*running)
        ended = [gone(report.worker, report.slot, job=report.job, kind="orphaned") for report in running]
        for number in range(1, len(running) + 1):
            self.beat(*ended[:number], *running[number:])
        self.incarnation += 1
        self.bench.host("host-1", 4, incarnation=self.incarnation)
        self.beat()

    def state(self, job: str) -> JobState:
        return self.bench.records[job].state


def test_a_job_that_is_alone_with_three_deaths_fails() -> None:
    deaths = Deaths()
    deaths.bench.submit()
    for _ in range(MAX_DEATHS):
        assert deaths.state("job-1") is not JobState.FAILED
        deaths.die()
        deaths.bench.now += 60
    assert deaths.state("job-1") is JobState.FAILED
    assert deaths.bench.records["job-1"].reason == REASON


def test_a_death_that_is_listed_again_while_its_host_drains_counts_once() -> None:
    deaths = Deaths()
    deaths.bench.submit()
    running = deaths.running()
    deaths.beat(*running)
    ended = [gone(report.worker, report.slot, kind="orphaned") for report in running]
    deaths.beat(*ended)
    deaths.bench.host("host-1", 4, state=HostState.DRAINING)
    deaths.beat(*ended)
    assert deaths.bench.records["job-1"].failures.fork_server_deaths == 1


def test_of_two_jobs_the_one_that_was_there_at_each_death_fails_and_the_other_is_cleared() -> None:
    deaths = Deaths()
    deaths.bench.submit(1, max_workers=2)
    deaths.die()
    deaths.bench.submit(2, max_workers=2)
    for _ in range(MAX_DEATHS - 1):
        deaths.bench.now += 60
        deaths.die()
    assert deaths.state("job-1") is JobState.FAILED
    assert deaths.state("job-2") is not JobState.FAILED
    assert deaths.bench.records["job-2"].failures.fork_server_deaths == 0


def test_of_two_jobs_that_were_always_there_together_the_newer_fails() -> None:
    deaths = Deaths()
    deaths.bench.submit(1, max_workers=2)
    deaths.bench.submit(2, max_workers=2)
    for _ in range(MAX_DEATHS):
        deaths.die()
        deaths.bench.now += 60
    assert deaths.state("job-1") is not JobState.FAILED
    assert deaths.state("job-2") is JobState.FAILED


def test_deaths_that_are_far_apart_fail_no_job() -> None:
    deaths = Deaths()
    deaths.bench.submit()
    for _ in range(2 * MAX_DEATHS):
        deaths.die()
        deaths.bench.now += FORGET_SECONDS
    assert deaths.state("job-1") is not JobState.FAILED


def test_the_count_survives_the_scheduler() -> None:
    deaths = Deaths()
    deaths.bench.submit()
    for _ in range(MAX_DEATHS):
        deaths.die()
        deaths.bench.restart()
        deaths.beat()
        deaths.bench.now += 60
    assert deaths.state("job-1") is JobState.FAILED
