"""A decision looks again only at what has changed: it decides as if it looked at everything."""

from collections.abc import Iterable, Mapping
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import initialize, rule

from resile_scheduler.core.core import Scheduler
from resile_scheduler.core.events import Command, Event, PolicyChangeRequested
from resile_scheduler.core.state.job import Job
from resile_scheduler.core.state.pool import Host, Pool
from resile_scheduler.policies.table import POLICIES
from resile_scheduler.simulation.simulated_pool import SimulatedPool
from resile_scheduler.simulation.training import Sharded
from resile_scheduler.simulation.workload import Submission
from resile_shared.messages.commands import PoolPolicy
from resile_shared.messages.hosts import HostState
from resile_shared.policies import PolicyName

from .test_core import AnyOrder, spec


class ForgetfulPool(Pool):
    """Everything may have changed, always."""

    def take_due(self, others: Mapping[str, Job]) -> list[Job]:
        super().take_due(others)
        self.hosts_version += 1
        self._stale.update(self.hosts)
        return list(self.jobs.values())

    def take_touched(self, others: Iterable[str]) -> list[Job]:
        return super().take_touched(self.jobs)

    def take_touched_hosts(self, others: Iterable[str]) -> list[Host]:
        return super().take_touched_hosts(self.hosts)


class TwoSchedulers(Scheduler):
    """A scheduler, and one that looks at everything each time: they give the same commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.forgetful = Scheduler(**options)
        self.forgetful._pool.__class__ = ForgetfulPool

    def handle(self, event: Event, *, now: float) -> list[Command]:
        commands = super().handle(event, now=now)
        assert commands == self.forgetful.handle(event, now=now)
        assert self.explain() == self.forgetful.explain()
        assert self.holders() == self.forgetful.holders()
        return commands


class TwoPools(SimulatedPool):
    """A simulated pool in which each event is handled twice."""

    def _new_scheduler(self) -> Scheduler:
        return TwoSchedulers(
            epoch=self._epoch,
            secret="simulated",
            policy=self.policy,
            policies=self._policies,
            limits=self._limits,
            detection_seconds=self._delays.detection,
        )


def test_a_job_leaves_a_host_that_drains_though_its_number_of_workers_stays() -> None:
    sim = TwoPools()
    for host in ("host-1", "host-2"):
        sim.add_host(host, 3)
    sim.submit([Submission(0.0, "job-1", spec(min_workers=1, max_workers=2, placement="spread"), Sharded(3000, 4))])
    sim.run(until=3.0)
    assert sim.hosts_of("job-1") == {"host-1", "host-2"}
    sim.change_host("host-2", HostState.DRAINING)
    sim.run(until=10.0)
    assert sim.hosts_of("job-1") == {"host-1"}
    assert len(sim.members("job-1")) == 2
    reasons = [item.reason for item in sim.histories["job-1"] if item.kind == "allocation"]
    assert reasons == ["start", "host-2 draining", "host-2 draining"]


class Incremental(AnyOrder):
    """Whatever happens, in whatever order it arrives, on hosts of two kinds."""

    def add_host(self, host: str) -> None:
        self.hosts[host] += 1
        kind, rack, num = ("gpu", "2", 2) if host == "host-3" else ("cpu", "1", 0)
        labels = {"rack": rack}
        self.sim.add_host(host, 3, incarnation=self.hosts[host], device_class=kind, num_devices=num, labels=labels)

    @initialize(seed=st.integers(0, 1 << 30), policy=st.sampled_from(sorted(POLICIES)))
    def begin(self, seed: int, policy: PolicyName) -> None:
        self.begin_with(TwoPools(policy=POLICIES[policy], policies=POLICIES), seed)

    @rule(choice=st.builds(PoolPolicy, policy=st.sampled_from(sorted(POLICIES)), preemption=st.booleans()))
    def the_policy_changes(self, choice: PoolPolicy) -> None:
        self.num_requests += 1
        self.sim.handle(PolicyChangeRequested(f"request-{self.num_requests}", choice))

    @rule(
        group=st.sampled_from(["", "rack=1", "rack=2"]),
        placement=st.sampled_from(["pack", "spread"]),
        least=st.integers(1, 3),
        iterations=st.integers(1, 60),
    )
    def a_job_comes_that_asks_for_places(self, group: str, placement: str, least: int, iterations: int) -> None:
        if len(self.sim.records) < 5:
            asked = spec(min_workers=least, max_workers=6, group=group, placement=placement)
            self.sim.submit([Submission(0.0, f"job-{len(self.sim.records) + 1}", asked, Sharded(iterations, 24))])
            self.sim.run(until=self.sim.now - self.sim.start, watch=self.checker.check)

    def teardown(self) -> None:
        """Let what is under way go on: whether all jobs end is for `AnyOrder` to see."""
        for _ in range(10 * hasattr(self, "sim")):
            self.time_passes(3.0)


def test_progress_alone_is_no_reason_to_look_at_a_job_again() -> None:
    """A job ends in a heartbeat that says, too, how far another one is: so near its end that it makes a difference."""
    state = Incremental()
    state.begin(seed=4108, policy=PolicyName.GOODPUT)
    for extra, iterations, least in ((5, 2, 1), (0, 34, 3), (8, 55, 1), (0, 1, 2), (0, 1, 3)):
        state.a_job_comes(extra=extra, iterations=iterations, least=least, shards=4)
    state.teardown()


Incremental.TestCase.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)
TestIncremental = Incremental.TestCase
