"""A job that gets slots in its turn trains with them: no start is cancelled for a job that comes after it."""

from collections.abc import Callable, Iterable

import pytest

from resile_scheduler.core.events import JobChangeRequested, StateRestored
from resile_scheduler.policies.table import POLICIES
from resile_scheduler.simulation.simulated_pool import SimulatedPool
from resile_scheduler.simulation.training import Sharded
from resile_scheduler.simulation.workload import Submission
from resile_shared.messages.commands import JobStop, PoolPolicy
from resile_shared.messages.jobs import JobSpec
from resile_shared.policies import PolicyName

ENDLESS = Sharded(10**7)
TICK_SECONDS = 30.0
EACH_POLICY = pytest.mark.parametrize("name", sorted(POLICIES))


def job(number: int, time: float, *, least: int = 1, most: int = 0, tenant: str = "a", rank: int = 5000) -> Submission:
    """One that needs ``least`` slots, and has a use for ``most``, or no more."""
    spec = JobSpec(
        name="long",
        package="packages/1",
        script="train.py",
        min_workers=least,
        max_workers=most or least,
        tenant=tenant,
        priority=rank,
    )
    return Submission(time, f"job-{number}", spec, ENDLESS)


def pool(name: PolicyName, slots: int, jobs: Iterable[Submission]) -> SimulatedPool:
    sim = SimulatedPool(policies=POLICIES, chosen=PoolPolicy(policy=name))
    sim.handle(StateRestored())
    sim.add_host("host-0", slots)
    sim.submit(jobs)
    return sim


def run(sim: SimulatedPool, *, until: float, watch: Callable[[], object]) -> None:
    """Let time pass, with heartbeats, and call ``watch`` after each action."""
    while sim.now - sim.start < until:
        sim.run(until=min(sim.now - sim.start + TICK_SECONDS, until), watch=watch)
        sim.send_heartbeats()


def starts_at_most(sim: SimulatedPool, most: int) -> Callable[[], None]:
    """Return what fails once a job has had more workers than ``most``."""

    def watch() -> None:
        for job, record in sim.records.items():
            assert record.next_worker <= most, f"{job} is started and cancelled, again and again"

    return watch


def stop(sim: SimulatedPool, name: str) -> None:
    sim.handle(JobChangeRequested(f"stop {name}", JobStop(job_id=name)))


def have_trained(sim: SimulatedPool, *jobs: str) -> bool:
    return all(sim.iteration(job) > 0 and sim.members(job) for job in jobs)


@EACH_POLICY
def test_of_two_tenants_that_are_due_one_trains_whichever_has_attained_less(name: PolicyName) -> None:
    sim = pool(name, 1, [job(1, 0, tenant="b"), job(2, 10, tenant="b"), job(3, 20, tenant="a")])
    watch = starts_at_most(sim, 1)
    run(sim, until=1000, watch=watch)
    stop(sim, "job-1")
    run(sim, until=2000, watch=watch)
    assert have_trained(sim, "job-2") or name is PolicyName.GOODPUT
    assert have_trained(sim, "job-2") or have_trained(sim, "job-3")


@EACH_POLICY
def test_a_job_that_no_host_can_hold_gives_its_tenant_no_turn(name: PolicyName) -> None:
    jobs = [job(1, 0, least=2, tenant="z"), job(2, 1, least=8, tenant="x")]
    sim = pool(name, 2, [*jobs, job(3, 1000, least=2, tenant="x"), job(4, 1001, least=2, tenant="y")])
    watch = starts_at_most(sim, 2)
    run(sim, until=1200, watch=watch)
    stop(sim, "job-1")
    run(sim, until=3000, watch=watch)
    assert have_trained(sim, "job-3"), "it got its slots before job-4 was due"


@EACH_POLICY
def test_a_job_that_waits_for_others_to_leave_gives_its_tenant_no_turn(name: PolicyName) -> None:
    jobs = [job(1, 0, tenant="z"), job(2, 0, tenant="z"), job(3, 1, least=2, tenant="x")]
    sim = pool(name, 2, [*jobs, job(4, 1000, tenant="x"), job(5, 1001, tenant="y")])
    watch = starts_at_most(sim, 2)
    run(sim, until=1010, watch=watch)
    stop(sim, "job-2")
    run(sim, until=3000, watch=watch)
    assert sum(have_trained(sim, f"job-{number}") for number in (1, 4, 5)) == 2


@pytest.mark.parametrize(("slots", "least"), [(8, 1), (3, 2)])
def test_a_job_that_was_due_keeps_its_slots_under_goodput_though_others_would_make_more_progress_with_them(
    slots: int, least: int
) -> None:
    sim = pool(PolicyName.GOODPUT, slots, [job(1, 0, most=slots), job(2, 5, least=least, rank=1)])
    watch = starts_at_most(sim, 2 * slots)
    run(sim, until=1000, watch=watch)
    assert have_trained(sim, "job-1", "job-2")
    sim.restart_scheduler()
    run(sim, until=2000, watch=watch)
    assert len(sim.trained("job-2")) == least, "the next scheduler knows it"
    assert have_trained(sim, "job-1", "job-2")


def test_a_job_that_trains_though_its_record_says_it_holds_no_slots_is_taken_over() -> None:
    """The record is stored before the allocation, and a crash may come between: each new scheduler ended at once."""
    sim = pool(PolicyName.FAIRSHARE, 2, [job(1, 0.0)])
    sim.run(until=5.0)
    members = sim.members("job-1")
    sim.records["job-1"] = sim.records["job-1"].model_copy(update={"holding_since": None})
    sim.restart_scheduler()
    sim.send_heartbeats()
    assert sim.members("job-1") == members != ()
    assert sim.records["job-1"].holding_since is not None
