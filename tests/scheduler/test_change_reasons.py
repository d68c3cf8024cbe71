"""The history says of each change what led to it, and not what led to an earlier one."""

from collections.abc import Callable

import pytest

from resile_scheduler.core.events import JobChangeRequested, Tick
from resile_scheduler.simulation.simulated_pool import SimulatedPool
from resile_scheduler.simulation.training import Sharded
from resile_scheduler.simulation.workload import Submission
from resile_shared.messages.commands import JobPause, JobPriority
from resile_shared.messages.hosts import HostState

from .test_core import Bench, worker
from .test_simulator import shapes, spec, two_hosts

LONG = Sharded(100_000)


def after_a_completion(*, then: Callable[[SimulatedPool], object], spare: int = 0) -> list[tuple[int, str]]:
    """Let job-2 grow because job-1 has completed, and ``then`` happen some time later; return what job-2 does then."""
    sim = two_hosts()
    if spare:
        sim.add_host("host-3", spare)
    sim.submit([Submission(0, "job-1", spec(), Sharded(300)), Submission(1, "job-2", spec(most=8), LONG)])
    sim.run(until=30)
    grown = shapes(sim, "job-2")
    assert grown[-1] == (8, "job-1 completed")
    then(sim)
    sim.run(until=90)
    return shapes(sim, "job-2")[len(grown) :]


def test_a_worker_that_is_replaced_long_after_a_completion() -> None:
    def kill(sim: SimulatedPool) -> None:
        sim.kill("job-2", sim.members("job-2")[1])

    lost, grown = after_a_completion(then=kill)
    assert lost[0] == 7
    assert "was killed" in lost[1]
    assert grown == (8, "replaces lost workers")


def test_growth_by_hosts_and_priorities_names_these() -> None:
    sim = two_hosts()
    limits = spec(placement="spread")  # so that jobs do not move to fewer hosts
    sim.submit([Submission(0, f"job-{n}", limits, Sharded(300) if n == 1 else LONG) for n in (1, 2, 3)])
    sim.run(until=60)
    before = len(shapes(sim, "job-2"))
    assert shapes(sim, "job-2")[-1] == (4, "job-1 completed")
    sim.add_host("host-3", 2)
    sim.run(until=90)
    sim.handle(JobChangeRequested("c1", JobPriority(job_id="job-2", priority=10_000)))
    sim.run(until=120)
    sim.change_host("host-3", HostState.LOST)
    sim.run(until=150)
    sim.handle(JobChangeRequested("c2", JobPause(job_id="job-3")))
    sim.run(until=180)
    expected = ["host-3 joined", "priority of job-2 raised", "host-3 lost", "job-3 paused"]
    assert [reason for _, reason in shapes(sim, "job-2")[before:]] == expected


@pytest.mark.parametrize("state", [HostState.DRAINING, HostState.LOST])
def test_a_host_that_goes_is_the_reason_for_leaving_it_and_for_growing_elsewhere(state: HostState) -> None:
    changes = after_a_completion(then=lambda sim: sim.change_host("host-2", state), spare=4)
    assert changes == [(4, f"host-2 {state.value}"), (8, f"host-2 {state.value}")]


def test_growth_onto_what_another_job_leaves_has_the_reason_for_which_it_leaves() -> None:
    sim = two_hosts()
    sim.submit([Submission(0, f"job-{n}", spec(), LONG) for n in (1, 2)])
    sim.run(until=20)
    sim.handle(JobChangeRequested("c1", JobPriority(job_id="job-2", priority=10_000)))
    sim.run(until=20.01)
    assert shapes(sim, "job-2")[-1][0] == 4, "job-1 has not left its slots yet"
    sim.run(until=40)
    assert shapes(sim, "job-1")[-1] == (3, "priority of job-2 raised")
    assert shapes(sim, "job-2")[-1] == (5, "priority of job-2 raised")


def test_a_host_that_is_tried_again_is_the_reason() -> None:
    def fail(sim: SimulatedPool) -> None:
        sim.kill("job-2", sim.members("job-2")[-1], kind="out of memory")
        sim.later(10, lambda: sim.handle(Tick()))

    lost, grown = after_a_completion(then=fail)
    assert (lost[0], grown) == (7, (8, "host-1 is tried again"))


def test_a_worker_that_is_replaced_long_after_the_scheduler_restarted() -> None:
    sim = two_hosts()
    sim.submit([Submission(0, "job-1", spec(), LONG)])
    sim.run(until=20)
    sim.restart_scheduler()
    sim.run(until=40)
    sim.kill("job-1", sim.members("job-1")[0])
    sim.run(until=60)
    assert shapes(sim, "job-1")[-1] == (8, "replaces lost workers")


def test_several_causes_of_one_event_are_all_named_and_each_once() -> None:
    bench = Bench(2, 2)
    pool = bench.scheduler._pool
    bench.submit(1, max_workers=8)
    bench.listen()
    bench.beat(*(worker(p.worker, p.slot) for p in bench.newest().placements if p.host == "host-2"), host="host-2")
    bench.switch()
    for number in range(3, 8):
        pool.changed(None, f"host-{number} lost")
        pool.changed(None, "host-3 lost")
    pool.changed(None, "it needs no reason of its own", by="job-1")
    bench.host("host-9", 2)
    bench.beat(host="host-9")
    assert bench.newest().reason == "host-3 lost, host-4 lost, host-5 lost and 3 more"
