"""No job waits forever: simulated days in which as much arrives as completes, under every policy."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType

import hypothesis.strategies as st
from hypothesis import example, given, settings

from resile_scheduler.core.events import JobChangeRequested
from resile_scheduler.policies.demand import Demand, Policy
from resile_scheduler.policies.preemption import without_preemption
from resile_scheduler.policies.ranking import PATIENCE_SECONDS
from resile_scheduler.policies.table import POLICIES
from resile_scheduler.policies.tenants import by_tenant
from resile_scheduler.simulation.simulated_pool import SimulatedPool
from resile_scheduler.simulation.training import Sharded
from resile_scheduler.simulation.workload import Submission
from resile_shared.messages.commands import JobStop
from resile_shared.messages.jobs import JobSpec, JobState
from resile_shared.messages.pool import TenantShare
from resile_shared.policies import PolicyName

SLOTS = 8
STEP_SECONDS = 60.0
LONGEST_SECONDS = 1800.0
"""Of a job that holds one slot."""


MOST_DECISIONS = 10
"""After so many in a row nothing changes any more."""


@dataclass
class Running:
    """A job, and what remains of it, in slot-seconds."""

    demand: Demand
    left: float
    since: float
    """Since when it holds slots, or waits."""

    def given(self, workers: int, now: float) -> Demand:
        """Its demand once it is given so many workers, before any time has passed."""
        before = self.demand
        if not workers:
            return replace(before, holds_slots=False, assigned_workers=0, holding_since=inf, was_due=False)
        if before.holds_slots:
            return replace(before, assigned_workers=workers)
        since, was_due = min(now, before.due_since), before.due_since <= now
        return replace(before, holds_slots=True, assigned_workers=workers, holding_since=since, was_due=was_due)

    def train(self, demand: Demand, now: float) -> None:
        """Let it go on as in ``demand`` until ``now``."""
        if demand.holds_slots is not self.demand.holds_slots:
            self.since = now - STEP_SECONDS
        slot_seconds = demand.assigned_workers * STEP_SECONDS
        due_since = self.since + PATIENCE_SECONDS
        is_due = not demand.holds_slots and due_since <= now
        self.left -= slot_seconds
        self.demand = replace(demand, attained=demand.attained + slot_seconds, due_since=due_since if is_due else inf)


class Days:
    """Jobs that arrive one after the other, at random, and more than there is room for."""

    def __init__(
        self,
        name: PolicyName,
        *,
        preemption: bool,
        seed: int,
        tenants: str,
        priority: int,
        shares: Mapping[str, TenantShare] = MappingProxyType({}),
    ) -> None:
        self.now = 0.0
        self.attained = dict.fromkeys(tenants, 0.0)
        self.policy = composed(name, preemption=preemption, shares=shares, attained=self.attained)
        self.rng = random.Random(seed)
        self.tenants = tenants
        self.priority = priority
        self.jobs: dict[str, Running] = {}
        self.num_jobs = 0
        self.served: set[str] = set()

    def add(self, *, least: int, most: int, priority: int, tenant: str, work: float) -> str:
        self.num_jobs += 1
        name = f"job-{self.num_jobs}"
        self.jobs[name] = Running(Demand(name, self.num_jobs, priority, least, most, tenant=tenant), work, self.now)
        return name

    def step(self) -> None:
        while sum(running.demand.least for running in self.jobs.values()) < 3 * SLOTS:
            least = self.rng.randint(1, 2)
            work = least * self.rng.uniform(60, LONGEST_SECONDS)
            tenant = self.rng.choice(self.tenants)
            self.add(least=least, most=self.rng.randint(least, 4), priority=self.priority, tenant=tenant, work=work)
        demands = self.decide()
        self.now += STEP_SECONDS
        for job, demand in demands.items():
            self.served |= {job} if demand.holds_slots else set()
            self.attained[demand.tenant] += demand.assigned_workers * STEP_SECONDS
            self.jobs[job].train(demand, self.now)
        self.jobs = {name: running for name, running in self.jobs.items() if running.left > 0}

    def decide(self) -> dict[str, Demand]:
        """Decide until nothing changes, as the scheduler does: what is taken back at once has served nobody."""
        demands = {job: running.demand for job, running in self.jobs.items()}
        for _ in range(MOST_DECISIONS):
            targets = self.policy(list(demands.values()), SLOTS)
            before = demands
            demands = {job: running.given(targets[job].workers, self.now) for job, running in self.jobs.items()}
            if demands == before:
                return demands
        raise AssertionError("slots are given and taken back, again and again")


def composed(
    name: PolicyName, *, preemption: bool, shares: Mapping[str, TenantShare], attained: Mapping[str, float]
) -> Policy:
    ranking = POLICIES[name].ranking
    policy = by_tenant(POLICIES[name], shares, ranking=ranking, attained=attained)
    return policy if preemption else without_preemption(policy, ranking=ranking)


@settings(max_examples=40, deadline=None)
@example(name=PolicyName.ELASTIC_BATCH, preemption=True, seed=1, tenants="ab", weight=3, least=7)
@example(name=PolicyName.FAIRSHARE, preemption=True, seed=8375, tenants="abc", weight=3, least=6)
@given(
    name=st.sampled_from(sorted(POLICIES)),
    preemption=st.booleans(),
    seed=st.integers(0, 10_000),
    tenants=st.sampled_from(["a", "ab", "abc"]),
    weight=st.integers(1, 4),
    least=st.integers(1, SLOTS),
)
def test_a_job_of_low_priority_or_with_a_large_minimum_is_served_however_many_others_arrive(
    name: PolicyName, preemption: bool, seed: int, tenants: str, weight: int, least: int
) -> None:
    """Under `priority` the others have the same priority: it is strict."""
    others = 5000
    shares = {"a": TenantShare(weight=weight)}
    days = Days(name, preemption=preemption, seed=seed, tenants=tenants, priority=others, shares=shares)
    for _ in range(20):
        days.step()
    rank = others if name is PolicyName.PRIORITY else 1
    job = days.add(least=least, most=SLOTS, priority=rank, tenant=tenants[-1], work=1000.0)
    patience = PATIENCE_SECONDS + 12 * LONGEST_SECONDS
    while patience > 0 and job not in days.served:
        days.step()
        patience -= STEP_SECONDS
    assert job in days.served


@settings(max_examples=20, deadline=None)
@given(name=st.sampled_from(sorted(POLICIES)), preemption=st.booleans(), seed=st.integers(0, 10_000))
def test_every_job_of_every_tenant_is_served(name: PolicyName, preemption: bool, seed: int) -> None:
    days = Days(name, preemption=preemption, seed=seed, tenants="abc", priority=5000)
    days.step()
    early = set(days.jobs)
    for _ in range(500):
        days.step()
    assert early <= days.served


def test_under_the_policy_priority_higher_priorities_come_first_for_good() -> None:
    days = Days(PolicyName.PRIORITY, preemption=True, seed=1, tenants="a", priority=5000)
    days.step()
    job = days.add(least=1, most=1, priority=4999, tenant="a", work=1000.0)
    for _ in range(300):
        days.step()
    assert job not in days.served


def test_of_several_that_are_due_the_first_starts_and_stays() -> None:
    """Each took the slots from the one before, and none ever trained."""
    sim = SimulatedPool()
    sim.add_host("host-0", 2)
    spec = JobSpec(name="long", package="packages/1", script="train.py", min_workers=2, max_workers=2)
    sim.submit([Submission(0.0, "job-1", spec, Sharded(10**6, num_shards=2))])
    sim.run(until=5.0)
    sizes = ((2, 2), (1, 1), (1, 2))
    waiting = [spec.model_copy(update={"min_workers": least, "max_workers": most}) for least, most in sizes]
    sim.submit(
        Submission(sim.now - sim.start + number, f"job-{number}", each, Sharded(10**6, num_shards=2))
        for number, each in enumerate(waiting, start=2)
    )
    sim.run(until=sim.now - sim.start + 10.0)
    sim.now += 2 * PATIENCE_SECONDS
    sim.send_heartbeats()
    sim.handle(JobChangeRequested("stop", JobStop(job_id="job-1")))
    for _ in range(100):
        sim.run(until=sim.now - sim.start + 0.2)
        assert sim.records["job-2"].next_worker <= 2, "it started once"
    assert [len(sim.alive(job)) for job in ("job-2", "job-3", "job-4")] == [2, 0, 0]
    assert sim.records["job-2"].state is JobState.RUNNING
