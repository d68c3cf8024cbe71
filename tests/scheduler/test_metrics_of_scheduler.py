"""What a scheduler measures is what happened to jobs and slots."""

from collections.abc import Sequence

import pytest

from resile_scheduler.core.events import Command, Event, StateRestored, Tick
from resile_scheduler.metrics import SchedulerMetrics
from resile_shared.messages.commands import JobStop
from resile_shared.messages.hosts import HostState
from resile_shared.telemetry.metrics import ServiceMetrics
from resile_testing.samples import samples

from .test_core import Bench, JobChangeRequested, ready
from .test_core import worker as listening


class MeasuredBench(Bench):
    """A scheduler whose events and commands are measured."""

    def __init__(self, *slots: int) -> None:
        self._metrics: tuple[ServiceMetrics, SchedulerMetrics] | None = None
        super().__init__(*slots)

    def tell_once(self, event: Event) -> list[Command]:
        if self._metrics is None or isinstance(event, StateRestored):
            served = ServiceMetrics("scheduler")
            self._metrics = served, SchedulerMetrics(served.meter, self.scheduler)
        commands = super().tell_once(event)
        self._metrics[1].on_handled(event, commands, seconds=0.001, now=self.now)
        return commands

    def measured(self) -> dict[str, float]:
        assert self._metrics is not None
        return samples(self._metrics[0].text())

    def pass_time(self, *seconds: float) -> Sequence[Command]:
        commands: list[Command] = []
        for passing in seconds:
            self.now += passing
            commands += self.tell(Tick())
        return commands


def bench_with_job(*slots: int, **spec: object) -> MeasuredBench:
    bench = MeasuredBench(*slots)
    bench.beat()
    bench.submit(**spec)
    return bench


def test_a_job_is_measured_from_its_submission_to_its_end() -> None:
    bench = bench_with_job(max_workers=4)
    assert bench.measured()['resile_jobs{state="queued"}'] == 1
    bench.now += 30.0
    bench.host("host-1", 4)
    bench.beat()
    assert bench.measured()['resile_jobs{state="starting"}'] == 1
    assert bench.measured()["resile_queue_wait_seconds_sum"] == 30.0
    bench.now += 5.0
    bench.activate()
    found = bench.measured()
    assert (found["resile_job_start_seconds_count"], found["resile_job_start_seconds_sum"]) == (1, 5.0)
    assert found["resile_workers"] == found['resile_job_workers{job="job-1"}'] == 4
    assert (found['resile_slots{state="held"}'], found['resile_slots{state="free"}']) == (4, 0)


@pytest.mark.parametrize("kind", [{}, {"gang": True, "min_workers": 4}, {"service": {"class_name": "Served"}}])
def test_workers_of_gangs_and_services_commit_no_iterations_and_are_none_that_train(kind: dict[str, object]) -> None:
    bench = bench_with_job(4, max_workers=4, **kind)
    bench.activate()
    found = bench.measured()
    assert found["resile_workers"] > 0
    assert found["resile_training_workers"] == (0 if kind else found["resile_workers"])


def test_a_change_and_a_recovery_are_measured_until_training_goes_on() -> None:
    bench = bench_with_job(2)
    bench.activate()
    bench.now += 10.0
    bench.host("host-2", 2)
    bench.beat(host="host-2")
    assert bench.measured()['resile_jobs{state="rescaling"}'] == 1
    bench.now += 3.0
    newest = bench.newest()
    for host in ("host-1", "host-2"):
        bench.beat(*(listening(p.worker, p.slot) for p in newest.placements if p.host == host), host=host)
    for placement in newest.placements:
        bench.report(ready(), worker=placement.worker)
    bench.switch(iteration=10)
    found = bench.measured()
    assert (found["resile_job_change_seconds_count"], found["resile_job_change_seconds_sum"]) == (1, 3.0)
    bench.host("host-2", 2, state=HostState.LOST)
    assert bench.measured()['resile_jobs{state="recovering"}'] == 1
    bench.now += 0.5
    bench.switch(iteration=12)
    found = bench.measured()
    assert (found["resile_job_recovery_seconds_count"], found["resile_job_recovery_seconds_sum"]) == (1, 0.5)


def test_slots_that_a_job_could_use_are_counted_while_they_are_idle() -> None:
    bench = bench_with_job(4, min_workers=5)
    bench.pass_time(1.0, 2.0)
    assert bench.measured()["resile_idle_slot_seconds_total"] == 8.0, "from the first tick on"
    nobody = MeasuredBench(4)
    nobody.beat()
    nobody.pass_time(1.0, 2.0)
    assert nobody.measured()["resile_idle_slot_seconds_total"] == 0.0


def test_a_new_scheduler_does_not_measure_what_it_has_not_seen_begin() -> None:
    bench = bench_with_job(2)
    bench.now += 100.0
    bench.restart()
    bench.beat()
    bench.activate()
    found = bench.measured()
    assert found['resile_jobs{state="running"}'] == 1
    assert "resile_job_start_seconds_count" not in found


def test_a_job_that_ended_counts_once() -> None:

    bench = bench_with_job(2)
    bench.tell(JobChangeRequested("stop", JobStop(job_id="job-1")))
    found = bench.measured()
    assert found['resile_jobs_ended_total{state="stopped"}'] == 1
    assert 'resile_job_workers{job="job-1"}' not in found
