"""The policy of a pool is changed while jobs train, kept by later schedulers, and named in the histories."""

import hypothesis.strategies as st
from hypothesis import example, given, settings

from resile_scheduler.core.core import Scheduler
from resile_scheduler.core.events import (
    Command,
    JobChangeRequested,
    PolicyChangeRequested,
    PoolSuspendRequested,
    Reply,
    StateRestored,
    StoreJob,
    StorePolicy,
)
from resile_scheduler.policies.table import POLICIES
from resile_scheduler.simulation.simulated_pool import SimulatedPool
from resile_scheduler.simulation.training import Sharded
from resile_scheduler.simulation.workload import Submission
from resile_shared.messages.commands import Accepted, JobPriority, PoolPolicy, Refused
from resile_shared.messages.jobs import MAX_COMMANDS, JobSpec, JobState
from resile_shared.messages.pool import PolicyRecord
from resile_shared.policies import PolicyName

from .checks import Checker
from .test_core import Bench
from .test_simulator import jobs, spec


def change(number: int, policy: PolicyName | None = None, *, preemption: bool | None = None) -> PolicyChangeRequested:
    return PolicyChangeRequested(f"change-{number}", PoolPolicy(policy=policy, preemption=preemption))


def stored(commands: list[Command]) -> list[PolicyRecord]:
    return [command.record for command in commands if isinstance(command, StorePolicy)]


def two_jobs() -> SimulatedPool:
    """Two jobs that train on four slots each."""
    sim = SimulatedPool(policies=POLICIES)
    sim.add_host("host-1", 4)
    sim.add_host("host-2", 4)
    sim.submit([Submission(0, "job-1", spec(), Sharded(10_000)), Submission(2, "job-2", spec(), Sharded(10_000))])
    sim.run(until=5)
    assert shares(sim) == [4, 4]
    return sim


def shares(sim: SimulatedPool) -> list[int]:
    return [len(sim.members(job)) for job in ("job-1", "job-2")]


def test_jobs_follow_a_new_policy_and_their_histories_name_it() -> None:
    sim = two_jobs()
    checker = Checker(sim)
    commands = sim.handle(change(1, PolicyName.FIFO))
    kinds = [type(command) for command in commands]
    assert kinds.index(StoreJob) < kinds.index(StorePolicy) < kinds.index(Reply), "stored before it is answered"
    (record,) = stored(commands)
    assert (record.policy, record.preemption, record.number) == (PolicyName.FIFO, True, 1)
    sim.run(until=10, watch=checker.check)
    assert shares(sim) == [8, 0], "the first takes all that it can use"
    sim.restart_scheduler()
    sim.send_heartbeats()
    sim.handle(JobChangeRequested("raise", JobPriority(job_id="job-2", priority=9000)))
    sim.run(until=15, watch=checker.check)
    assert shares(sim) == [8, 0], "the next scheduler keeps the policy"
    sim.handle(change(2, PolicyName.PRIORITY))
    sim.run(until=20, watch=checker.check)
    assert shares(sim) == [2, 6], "with 24 shards, 7 are no faster than 6"
    sim.handle(change(3, PolicyName.FAIRSHARE))
    sim.run(until=25, watch=checker.check)
    assert shares(sim) == [3, 5]
    reasons = [item.reason for item in sim.histories["job-1"] if item.kind == "allocation"]
    assert reasons == ["start", "fair share with job-2", "policy fifo", "policy priority", "policy fairshare"]


def test_without_preemption_nobody_loses_slots_to_a_higher_priority() -> None:
    sim = two_jobs()
    sim.handle(change(1, PolicyName.PRIORITY, preemption=False))
    sim.handle(JobChangeRequested("raise", JobPriority(job_id="job-2", priority=9000)))
    sim.submit([Submission(5, "job-3", spec(priority=10_000), Sharded(10_000))])
    sim.run(until=10)
    assert shares(sim) == [4, 4]
    assert sim.scheduler.explain() == {
        "job-1": "it keeps what it has: preemption is off",
        "job-2": "it keeps what it has: preemption is off",
        "job-3": "waiting for a slot: preemption is off, and job-1, job-2 leave fewer",
    }
    sim.crash("host-2")
    sim.run(until=20)
    assert shares(sim) == [4, 0], "what a job has lost with its host is not taken from another one"
    sim.add_host("host-2", 4, incarnation=2)
    sim.run(until=30)
    assert (shares(sim), len(sim.members("job-3"))) == ([4, 1], 3), "what is new goes by priority"
    sim.handle(change(2, preemption=True))
    sim.run(until=40)
    assert (shares(sim), len(sim.members("job-3"))) == ([1, 1], 6)
    assert sim.histories["job-1"][-1].reason == "preemption on"


def test_a_change_has_its_effect_once_however_late_it_arrives_again() -> None:
    bench = Bench(4)
    bench.scheduler = Scheduler(policies=POLICIES)
    bench.host("host-1", 4)
    first = change(1, PolicyName.FIFO)
    bench.tell(first)
    (record,) = stored(bench.tell_once(change(2, PolicyName.PRIORITY)))
    assert bench.tell(first) == [Reply("change-1", Accepted())]
    bench.scheduler = Scheduler(epoch=2, policies=POLICIES)
    bench.tell(StateRestored(hosts=tuple(bench.hosts.values()), policy=record))
    assert bench.tell(first) == [Reply("change-1", Accepted())]
    bench.submit(1, priority=1, max_workers=4)
    bench.submit(2, priority=2, max_workers=4)
    assert bench.scheduler.explain()["job-2"] == "waiting for slots that other jobs release"


def test_a_change_to_what_holds_already_moves_nothing_and_is_no_event() -> None:
    sim = two_jobs()
    before = list(sim.allocations)
    (record,) = stored(sim.handle(change(1, PolicyName.FAIRSHARE, preemption=True)))
    assert (record.number, record.changed) == (0, None)
    assert sim.allocations == before


def test_a_policy_that_the_scheduler_does_not_have_is_refused_with_those_it_has() -> None:
    bench = Bench()
    bench.scheduler = Scheduler(policies={PolicyName.FAIRSHARE: POLICIES[PolicyName.FAIRSHARE]})
    (reply,) = bench.tell(change(1, PolicyName.FIFO))
    assert reply == Reply("change-1", Refused(code="invalid", reason="unknown policy fifo: this pool knows fairshare"))


def test_few_ids_of_commands_are_kept() -> None:
    bench = Bench()
    bench.scheduler = Scheduler(policies=POLICIES)
    for number in range(MAX_COMMANDS + 10):
        (record,) = stored(bench.tell_once(change(number, preemption=number % 2 == 1)))
    assert len(record.applied_commands) == MAX_COMMANDS


def test_a_later_scheduler_keeps_the_policy_unless_it_is_started_with_another() -> None:
    kept = PolicyRecord(policy=PolicyName.PRIORITY, preemption=False, number=3)
    bench = Bench()
    bench.scheduler = Scheduler(epoch=2, policies=POLICIES)
    assert stored(bench.tell_once(StateRestored(policy=kept))) == []
    bench.scheduler = Scheduler(epoch=3, policies=POLICIES, chosen=PoolPolicy(policy=PolicyName.FIFO))
    (record,) = stored(bench.tell_once(StateRestored(policy=kept)))
    assert (record.policy, record.preemption, record.number) == (PolicyName.FIFO, False, 4)


def test_a_pool_that_is_stopping_starts_nothing_whatever_its_policy() -> None:
    sim = two_jobs()
    sim.handle(PoolSuspendRequested("suspend", sim.scheduler.epoch))
    sim.handle(change(1, PolicyName.FIFO))
    sim.run(until=20)
    assert shares(sim) == [0, 0]
    assert {record.state for record in sim.records.values()} == {JobState.QUEUED}
    assert set(sim.scheduler.explain().values()) == {"the pool is stopping: it continues when the pool is up again"}


choices = st.tuples(st.floats(0, 20), st.none() | st.sampled_from(sorted(POLICIES)), st.none() | st.booleans())
A_JOB_THAT_EXCHANGES = ((1, 1), (1, 1), (1, 1), (2, 1), (3, 2))
"""Jobs by maximum and iterations, of which the last is on two hosts and then exchanges slots."""
MOVES = ("it moves to fewer hosts", "it exchanges slots, for fewer hosts of a job")
priorities = st.tuples(st.floats(0, 20), st.integers(1, 10), st.integers(1, 10_000))


def pool_of(many: list[tuple[float, JobSpec, int, int]]) -> SimulatedPool:
    sim = SimulatedPool(policies=POLICIES)
    for number in (1, 2):
        sim.add_host(f"host-{number}", 4)
    sim.submit(
        Submission(time, f"job-{number}", job, Sharded(iterations, shards))
        for number, (time, job, iterations, shards) in enumerate(many, start=1)
    )
    return sim


@settings(max_examples=25, deadline=None)
@given(many=st.lists(jobs, min_size=1, max_size=6), changes=st.lists(choices, max_size=6), restarts=st.booleans())
def test_all_jobs_complete_however_often_the_policy_changes(
    many: list[tuple[float, JobSpec, int, int]],
    changes: list[tuple[float, PolicyName | None, bool | None]],
    restarts: bool,
) -> None:
    sim = pool_of(many)

    def apply(number: int, policy: PolicyName | None, preemption: bool | None) -> None:
        sim.handle(change(number, policy, preemption=preemption))
        if restarts:
            sim.restart_scheduler()
            sim.send_heartbeats()

    for number, (time, policy, preemption) in enumerate(changes):
        sim.later(time, lambda n=number, p=policy, on=preemption: apply(n, p, on))  # type: ignore[misc]
    sim.run(watch=Checker(sim).check)
    assert {record.state for record in sim.records.values()} == {JobState.COMPLETED}


@settings(max_examples=25, deadline=None)
@given(
    many=st.lists(jobs, min_size=2, max_size=6),
    changes=st.lists(choices, max_size=3),
    raised=st.lists(priorities, max_size=4),
)
@example(
    many=[(0.0, spec(most=most), iterations, 4) for most, iterations in A_JOB_THAT_EXCHANGES], changes=[], raised=[]
)
def test_without_preemption_no_job_that_trains_ever_shrinks_while_the_hosts_stay(
    many: list[tuple[float, JobSpec, int, int]],
    changes: list[tuple[float, PolicyName | None, bool | None]],
    raised: list[tuple[float, int, int]],
) -> None:
    sim = pool_of(many)
    sim.handle(change(100, preemption=False))
    for number, (time, policy, _) in enumerate(changes):
        sim.later(time, lambda n=number, p=policy: sim.handle(change(n, p)))  # type: ignore[misc]
    for number, (time, job, priority) in enumerate(raised):
        request = JobPriority(job_id=f"job-{job}", priority=priority)
        sim.later(time, lambda n=number, r=request: sim.handle(JobChangeRequested(f"priority-{n}", r)))  # type: ignore[misc]
    sim.run(watch=Checker(sim).check)
    for number, (_, asked, _, shards) in enumerate(many, start=1):
        history = sim.histories[f"job-{number}"]
        most = max((size for size in asked.sizes if size <= shards), default=shards)
        allocations = [item for item in history if item.kind == "allocation"]
        # On its way to fewer hosts a job has fewer workers for a while; nobody else has got them.
        workers = [min(item.workers, most) for item in allocations if item.reason not in MOVES]
        assert workers == sorted(workers)
        assert all(item.workers >= asked.min_workers for item in allocations)
        assert "suspending" not in [item.kind for item in history]
