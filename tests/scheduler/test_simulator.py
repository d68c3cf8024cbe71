"""The core in virtual time: the story of the demo, and pools of many jobs, checked after each step."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from resile_scheduler.core.events import Event, JobChangeRequested, StopWorkers
from resile_scheduler.core.state.observations import CHANGE_SECONDS
from resile_scheduler.policies.demand import Demand
from resile_scheduler.policies.elastic_batch import elastic_batch
from resile_scheduler.policies.table import POLICIES
from resile_scheduler.policies.throughput import Line, Throughput
from resile_scheduler.simulation.simulated_pool import SimulatedPool
from resile_scheduler.simulation.training import Modelled, Sharded
from resile_scheduler.simulation.workers import Delays
from resile_scheduler.simulation.workload import Submission
from resile_shared.messages.commands import JobPause, JobPriority, JobResume, JobStop
from resile_shared.messages.hosts import Heartbeat, HostState
from resile_shared.messages.jobs import HistoryItem, JobRecord, JobSpec, JobState
from resile_shared.messages.reports import BatchRange, Progress, Report, Switched

from .checks import Checker


def spec(name: str = "train", *, least: int = 1, most: int = 10_000, priority: int = 5000, **fields: object) -> JobSpec:
    limits = {"min_workers": least, "max_workers": most, "priority": priority}
    return JobSpec.model_validate({"name": name, "package": "packages/1", "script": "train.py", **limits, **fields})


def two_hosts() -> SimulatedPool:
    sim = SimulatedPool()
    sim.add_host("host-1", 4)
    sim.add_host("host-2", 4)
    return sim


def shapes(sim: SimulatedPool, job: str) -> list[tuple[int, str]]:
    return [(item.workers, item.reason) for item in sim.histories[job] if item.kind == "allocation"]


def kinds(sim: SimulatedPool, job: str) -> list[str]:
    return [item.kind for item in sim.histories[job]]


def is_sharing(record: JobRecord) -> bool:
    """Whether the job takes part in the sharing of slots."""
    waits = record.state in (JobState.PAUSED, JobState.ACCEPTED) or record.intent.value in ("pausing", "suspending")
    return not (record.state.is_final or waits or record.completed)


def unmeasured(event: Event) -> Event:
    """``event`` without what iterations measured."""
    if not isinstance(event, Report) or not isinstance(event.content, Progress):
        return event
    return event.model_copy(update={"content": event.content.model_copy(update={"measurement": None})})


def settled_shares(sim: SimulatedPool, checker: Checker) -> dict[str, int]:
    """What the policy gives the jobs that train, in a pool where nothing is in flight."""
    allocated = checker.allocated()
    demands = [
        Demand(
            job=record.job,
            number=number,
            priority=record.priority,
            least=record.spec.min_workers,
            sizes=record.spec.sizes or None,
            most=min(record.spec.max_workers, record.ready.num_shards if record.ready else 10_000),
            num_shards=record.ready.num_shards if record.ready else None,
            holds_slots=record.job in allocated,
            assigned_workers=allocated.get(record.job, 0),
            change_seconds=CHANGE_SECONDS,
            slots_per_host=4,
        )
        for number, record in enumerate(sim.records.values())
        if is_sharing(record)
    ]
    targets = sim.policy(demands, len(checker.usable()))
    return {job: target.workers for job, target in targets.items() if target.workers}


def test_the_story_of_the_two_jobs() -> None:
    """8, then 4 and 4, then 3 and 5, then 8: the story that the demo tells."""
    sim = two_hosts()
    checker = Checker(sim)
    sim.submit([Submission(0, "job-1", spec(most=8), Sharded(400)), Submission(5, "job-2", spec(most=8), Sharded(900))])
    sim.later(15, lambda: sim.handle(JobChangeRequested("c1", JobPriority(job_id="job-2", priority=10_000))))
    sim.run(watch=checker.check)
    assert shapes(sim, "job-1") == [(8, "start"), (4, "fair share with job-2"), (3, "priority of job-2 raised")]
    assert shapes(sim, "job-2") == [(4, "start"), (5, "priority of job-2 raised"), (8, "job-1 completed")]
    assert kinds(sim, "job-2")[:2] == ["accepted", "queued"]
    assert all(record.state is JobState.COMPLETED for record in sim.records.values())


def test_the_story_with_a_draining_host_that_returns() -> None:
    sim = two_hosts()
    checker = Checker(sim)
    sim.submit([Submission(0, "job-1", spec(), Sharded(1500)), Submission(5, "job-2", spec(), Sharded(1500))])
    sim.later(10, lambda: sim.change_host("host-2", HostState.DRAINING))
    sim.later(14, lambda: sim.change_host("host-2", HostState.LEFT))
    sim.later(20, lambda: sim.add_host("host-2", 4, incarnation=2))
    sim.run(until=9, watch=checker.check)
    assert checker.allocated() == {"job-1": 4, "job-2": 4}
    sim.run(until=13.9, watch=checker.check)
    assert checker.allocated() == {"job-1": 2, "job-2": 2}, "the job on the draining host moved as a whole"
    assert {slot.partition("/")[0] for slot in sim.scheduler.holders()} == {"host-1"}
    sim.run(until=23, watch=checker.check)
    assert checker.allocated() == {"job-1": 4, "job-2": 4}
    sim.run(watch=checker.check)
    assert all(record.state is JobState.COMPLETED for record in sim.records.values())


def test_an_exact_division_is_reached_while_training_goes_on() -> None:
    """A shrink costs its job at most the iteration in flight, and a growth none."""
    sim = two_hosts()
    sim.submit([Submission(0, "job-1", spec(), Sharded(300)), Submission(3, "job-2", spec(), Sharded(10))])
    sim.run(until=3.0)
    before = sim.iteration("job-1")
    sim.run(until=3.1)
    [_, shrink] = [item for item in sim.histories["job-1"] if item.kind == "allocation"]
    assert shrink.iteration - before <= 100
    assert (shrink.time.timestamp() - sim.start) <= 3.0 + 0.03 + 0.001


def test_a_job_pauses_with_a_checkpoint_and_goes_on_from_there() -> None:
    sim = two_hosts()
    checker = Checker(sim)
    sim.submit([Submission(0, "job-1", spec(), Sharded(400))])
    sim.later(3, lambda: sim.handle(JobChangeRequested("c1", JobPause(job_id="job-1"))))
    sim.later(5, lambda: sim.handle(JobChangeRequested("c2", JobResume(job_id="job-1"))))
    sim.run(until=4.9, watch=checker.check)
    record = sim.records["job-1"]
    assert record.state is JobState.PAUSED
    assert record.checkpoint is not None
    assert len(checker.free_slots()) == 8
    sim.run(watch=checker.check)
    assert kinds(sim, "job-1") == ["accepted", "allocation", "pausing", "paused", "allocation", "completed"]
    again = sim.histories["job-1"][4]
    assert again.iteration == record.checkpoint.iteration
    assert [a.resume for a in sim.allocations if a.cold_start] == [False, False, True, True]


def test_a_job_whose_minimum_exceeds_the_pool_waits_until_a_host_comes() -> None:
    sim = SimulatedPool()
    sim.submit([Submission(0, "job-1", spec(least=6), Sharded(50)), Submission(1, "job-2", spec(), Sharded(50))])
    sim.run()
    assert sim.scheduler.explain()["job-1"] == "waiting for a host: the pool has no slots"
    sim.add_host("host-1", 4)
    assert sim.scheduler.explain()["job-1"] == "waiting for hosts: its minimum is 6 and it can have at most 4"
    sim.run()
    assert sim.records["job-2"].state is JobState.COMPLETED
    sim.add_host("host-2", 4)
    sim.run()
    assert sim.records["job-1"].state is JobState.COMPLETED


def test_a_job_that_loses_its_minimum_is_suspended_and_comes_back() -> None:
    sim = two_hosts()
    checker = Checker(sim)
    sim.submit([Submission(0, "job-1", spec(least=6), Sharded(300))])
    sim.later(3, lambda: sim.change_host("host-2", HostState.DRAINING))
    sim.run(watch=checker.check)
    assert sim.records["job-1"].state is JobState.QUEUED
    sim.add_host("host-3", 4)
    sim.run(watch=checker.check)
    assert sim.records["job-1"].state is JobState.COMPLETED
    assert kinds(sim, "job-1") == ["accepted", "allocation", "suspending", "queued", "allocation", "completed"]


def test_a_job_runs_on_one_class_of_device() -> None:
    sim = SimulatedPool()
    sim.add_host("host-1", 4, device_class="cpu-a")
    sim.add_host("host-2", 6, device_class="cpu-b")
    sim.submit([Submission(0, "job-1", spec(), Sharded(300)), Submission(1, "job-2", spec(), Sharded(300))])
    sim.run(until=3)
    assert Checker(sim).allocated() == {"job-1": 6, "job-2": 4}


def test_a_job_goes_to_a_class_that_has_slots_for_its_minimum() -> None:
    """Not to one with too few, although paused jobs have trained on the other."""
    sim = SimulatedPool()
    sim.add_host("host-1", 2, device_class="cpu-a")
    for number in (1, 2, 3):
        sim.submit([Submission(sim.now - sim.start, f"job-{number}", spec(most=1), Sharded(10_000))])
        sim.run(until=10.0 * number)
        sim.handle(JobChangeRequested(f"pause {number}", JobPause(job_id=f"job-{number}")))
    sim.run(until=40.0)
    assert {record.state for record in sim.records.values()} == {JobState.PAUSED}
    sim.add_host("host-2", 1, device_class="cpu-b")
    sim.submit([Submission(40.0, "job-4", spec(least=2), Sharded(300))])
    sim.run(until=45.0)
    assert sim.hosts_of("job-4") == {"host-1"}


def test_a_job_goes_to_a_class_on_which_others_leave_slots_for_its_minimum() -> None:
    """Not to one with more slots for each job, which the minimum of another job needs."""
    sim = SimulatedPool()
    sim.add_host("host-1", 4, device_class="cpu-a")
    sim.add_host("host-2", 3, device_class="cpu-b")
    specs = (spec(least=4), spec(most=1), spec(most=1), spec())
    sim.submit([Submission(5.0 * n, f"job-{n}", each, Sharded(10_000)) for n, each in enumerate(specs, 1)])
    sim.run(until=30.0)
    assert [sim.hosts_of(f"job-{n}") for n in (1, 2, 3, 4)] == [{"host-1"}, {"host-2"}, {"host-2"}, {"host-2"}]


def test_a_job_that_no_host_fits_says_which_labels_it_waits_for() -> None:
    sim = SimulatedPool()
    sim.add_host("host-1", 4, labels={"gpu": "a100"})
    sim.submit([Submission(0, "job-1", spec(group="gpu=h200"), Sharded(300))])
    sim.run(until=3)
    reason = "waiting for a host with the labels gpu=h200: none of those that are up has them"
    assert sim.scheduler.explain()["job-1"] == reason
    assert sim.histories["job-1"][-1].reason == reason
    sim.add_host("host-2", 4, labels={"gpu": "h200"})
    sim.run()
    assert sim.records["job-1"].state is JobState.COMPLETED


def test_a_job_moves_to_one_host_when_it_has_room() -> None:
    """Members leave and joiners come: two changes, and no more of them."""
    sim = SimulatedPool()
    checker = Checker(sim)
    for host in ("host-1", "host-2"):
        sim.add_host(host, 4)
    short, long = Sharded(30, num_shards=3), Sharded(3000, num_shards=4)
    sim.submit([Submission(0, f"job-{n}", spec(most=3), short) for n in (1, 2)])
    sim.submit([Submission(0.01, "job-3", spec(least=2, most=2), long)])
    sim.run(until=2, watch=checker.check)
    assert sim.hosts_of("job-3") == {"host-1", "host-2"}
    sim.run(until=25, watch=checker.check)
    assert len(sim.hosts_of("job-3")) == 1
    allocations = [item for item in sim.histories["job-3"] if item.kind == "allocation"]
    assert "it moves to fewer hosts" in [item.reason for item in allocations]
    assert len(allocations) <= 3
    sim.run(watch=checker.check)
    assert sim.records["job-3"].state is JobState.COMPLETED


def test_a_job_on_two_full_hosts_exchanges_slots_with_another_one() -> None:
    sim = two_hosts()
    checker = Checker(sim)
    short, long = Sharded(300, num_shards=4), Sharded(10_000, num_shards=4)
    work = [short, long, short, long]
    sim.submit([Submission(n, f"job-{n}", spec(least=2, most=2), work[n - 1]) for n in (1, 2, 3, 4)])
    sim.submit([Submission(6, "job-5", spec(least=2, most=4), long)])
    sim.run(until=60, watch=checker.check)
    slots = [item.slots for item in sim.histories["job-5"] if item.kind == "allocation"]
    assert [len({slot.split("/")[0] for slot in held}) for held in slots] == [1, 2, 1, 1], "it leaves a host and grows"
    assert [len(held) for held in slots] == [2, 4, 2, 4]
    assert shapes(sim, "job-5")[-1][1] == "it exchanges slots, for fewer hosts of a job"
    assert sim.hosts_of("job-2") == sim.hosts_of("job-4") != sim.hosts_of("job-5")


def test_a_batch_that_changes_alone_costs_nothing() -> None:
    sim = SimulatedPool(policy=elastic_batch, delays=Delays(change=5.0))
    sim.add_host("host-1", 2)
    pauses: list[float] = []

    def channel(event: Event) -> list[Event]:
        if isinstance(event, Report) and isinstance(event.content, Switched):
            pauses.append(event.content.pause_seconds)
        return [event]

    sim.channel = channel
    throughput = Throughput(compute=Line(0.01, 0.001), exchange=Line(0.01), num_measured=1)
    training = Modelled(1e6, throughput, 64, 8, BatchRange(least=64, most=512))
    sim.submit([Submission(0, "job-1", spec(most=2), training)])
    for second in (5, 40):
        sim.run(until=second)
        sim.send_heartbeats()
    sim.run(until=50)
    assert [item.workers for item in sim.histories["job-1"] if item.kind == "allocation"] == [2, 2]
    assert pauses == [0.0, 0.0]


def test_jobs_that_wait_for_drained_hosts_say_so_and_train_once_these_are_undrained() -> None:
    sim = two_hosts()
    checker = Checker(sim)
    submissions = [Submission(0, "job-1", spec(), Sharded(300)), Submission(0, "job-2", spec(least=6), Sharded(300))]
    sim.submit([*submissions, Submission(0, "job-3", spec(group="gpu=h200"), Sharded(300))])
    sim.run(until=3, watch=checker.check)
    for host in ("host-1", "host-2"):
        sim.change_host(host, HostState.DRAINING)
    sim.run(until=6, watch=checker.check)
    both = "host-1 and host-2 are drained"
    expected = {"job-1": f"waiting for a slot: {both}", "job-2": f"waiting for 6 slots: {both}"}
    reasons = sim.scheduler.explain()
    assert {job: reasons[job] for job in expected} == expected
    assert "drained" not in reasons["job-3"]
    assert sim.records["job-1"].state is JobState.QUEUED
    sim.change_host("host-1", HostState.UP)
    assert sim.scheduler.explain()["job-2"] == "waiting for 6 slots: host-2 is drained"
    sim.run(until=9, watch=checker.check)
    assert sim.records["job-1"].state is JobState.RUNNING
    sim.change_host("host-2", HostState.UP)
    sim.run(watch=checker.check)
    assert [sim.records[job].state for job in ("job-1", "job-2")] == [JobState.COMPLETED] * 2


@pytest.mark.parametrize("bits", ["same bits", "fast"])
def test_a_job_continues_on_the_class_on_which_it_trained_unless_bits_do_not_matter(bits: str) -> None:
    sim = SimulatedPool()
    sim.add_host("host-1", 4, device_class="cpu-a")
    sim.submit([Submission(0, "job-1", spec(), Sharded(300), bits=bits)])
    sim.run(until=3)
    assert sim.iteration("job-1") > 0
    sim.add_host("host-2", 4, device_class="cpu-b")
    sim.change_host("host-1", HostState.DRAINING)
    sim.run(until=6)
    if bits == "fast":
        assert sim.records["job-1"].state is JobState.RUNNING
        return
    sim.restart_scheduler()
    drained = "waiting for a slot: host-1 is drained; hosts of another class give other bits"
    assert sim.scheduler.explain()["job-1"] == drained
    sim.change_host("host-1", HostState.LOST)
    assert sim.scheduler.explain()["job-1"] == (
        "waiting for a host of the class on which it trained, cpu-a: another one gives other bits"
    )
    sim.add_host("host-3", 4, device_class="cpu-a")
    sim.run()
    assert sim.records["job-1"].state is JobState.COMPLETED


jobs = st.builds(
    lambda least, extra, sizes, priority, iterations, shards, time: (
        time,
        spec(least=least, most=least + extra, priority=priority, sizes=(least, *sizes) if sizes else ()),
        iterations,
        shards,
    ),
    st.integers(1, 4),
    st.integers(0, 8),
    st.sampled_from([(), (), (5, 8)]),
    st.sampled_from([1000, 2500, 5000, 10_000]),
    st.integers(1, 300),
    st.sampled_from([4, 8, 12, 24]),
    st.floats(0, 20),
)


@settings(max_examples=25, deadline=None)
@given(many=st.lists(jobs, min_size=1, max_size=10), policy=st.sampled_from(sorted(POLICIES)))
def test_ten_jobs_of_mixed_sizes_all_complete(many: list[tuple[float, JobSpec, int, int]], policy: str) -> None:
    """Shares are right whenever nothing is under way, and no slot is ever held twice.

    Nothing is measured: by what is, a policy may find a change not worth its cost.
    """
    sim = SimulatedPool(policy=POLICIES[policy])
    sim.channel = lambda event: [unmeasured(event)]
    sim.add_host("host-1", 4)
    sim.add_host("host-2", 4)
    checker = Checker(sim)
    moments: list[float] = []
    sim.submit(
        Submission(time, f"job-{number}", job, Sharded(iterations, shards))
        for number, (time, job, iterations, shards) in enumerate(many, start=1)
    )

    def watch() -> None:
        checker.check()
        records = [record for record in sim.records.values() if not record.state.is_final]
        newest = {allocation.job: allocation.generation for allocation in sim.allocations}
        is_settling = any(newest.get(record.job, 0) > record.generation for record in records)
        is_idle = len(checker.free_slots()) == len(checker.usable()) - sum(checker.allocated().values())
        if is_idle and not is_settling and all(map(is_sharing, records)):
            moments.append(sim.now)
            assert checker.allocated() == settled_shares(sim, checker)

    sim.run(watch=watch)
    assert moments
    assert len(sim.records) == len(many)
    assert {record.state for record in sim.records.values()} == {JobState.COMPLETED}
    overlaps(sim)


def overlaps(sim: SimulatedPool) -> None:
    """Read the stored histories alone: at no moment do two jobs train on one slot."""
    changes: list[tuple[float, int, str, HistoryItem]] = []
    for record in sim.records.values():
        for item in sim.histories[record.job]:
            if item.kind in ("allocation", "completed", "failed", "stopped", "paused", "queued"):
                changes.append((item.time.timestamp(), len(changes), record.job, item))
    by_time: dict[float, list[tuple[str, HistoryItem]]] = {}
    for time, _, job, item in sorted(changes, key=lambda change: change[:2]):
        by_time.setdefault(time, []).append((job, item))
    now: dict[str, tuple[str, ...]] = {}
    for items in by_time.values():
        for job, item in items:
            now[job] = item.slots if item.kind == "allocation" else ()
        held = [slot for slots in now.values() for slot in slots]
        assert len(set(held)) == len(held)


def test_only_allowed_sizes_ever_train_but_for_what_is_left_after_a_loss() -> None:
    sim = two_hosts()
    checker = Checker(sim)
    sim.submit(
        [Submission(0, "job-1", spec(sizes=(2, 4, 8)), Sharded(3000)), Submission(5, "job-2", spec(), Sharded(3000))]
    )
    sim.later(10, lambda: sim.kill("job-1", sim.members("job-1")[0]))
    sim.run(until=20, watch=checker.check)
    assert [len(sim.members(job)) for job in ("job-1", "job-2")] == [4, 4]
    assert [workers for workers, _ in shapes(sim, "job-1")] == [8, 4, 3, 4]


def test_a_job_with_fewer_shards_than_its_least_size_has_as_many_workers_as_shards() -> None:
    sim = two_hosts()
    sim.submit([Submission(0, "job-1", spec(sizes=(6, 8)), Sharded(100, num_shards=4))])
    sim.run(watch=Checker(sim).check)
    assert sim.records["job-1"].state is JobState.COMPLETED
    assert shapes(sim, "job-1")[-1][0] == 4


def test_a_larger_pool() -> None:
    sim = SimulatedPool()
    for number in range(1, 11):
        sim.add_host(f"host-{number}", 4)
    checker = Checker(sim)
    sim.submit(Submission(n * 0.7, f"job-{n}", spec(priority=1000 * (n % 5 + 1)), Sharded(40 + n)) for n in range(30))
    sim.run(watch=checker.check)
    assert {record.state for record in sim.records.values()} == {JobState.COMPLETED}


def test_an_agent_reports_workers_that_it_never_had_once() -> None:
    """As a real one does: a stop that is repeated brings no heartbeat, or each would bring more stops."""
    sim = SimulatedPool()
    sim.add_host("host-1", 4)
    spec = JobSpec(name="train", package="packages/1", script="train.py", max_workers=1)
    sim.submit([Submission(0.0, "job-1", spec, Sharded(10**6))])
    sim.run(until=10)
    beats: list[Heartbeat] = []

    def channel(event: Event) -> list[Event]:
        if isinstance(event, Heartbeat):
            beats.append(event)
        return []

    sim.channel = channel
    stop = StopWorkers("job-1", "host-1", 1, (7, 8, 9))
    for _ in range(3):
        sim._execute(stop)
        sim.run(until=sim.now - sim.start + 1)
    (beat,) = beats
    assert [worker.worker for worker in beat.workers if worker.state == "gone"] == [7, 8, 9]


def test_a_job_that_is_stopped_as_it_starts_to_train_does_not_train() -> None:
    sim = SimulatedPool()
    sim.add_host("host-1", 4)
    spec = JobSpec(name="train", package="packages/1", script="train.py", max_workers=4, min_workers=4, gang=True)
    sim.submit([Submission(0.0, "job-1", spec, Sharded(10**6))])

    def channel(event: Event) -> list[Event]:
        is_switched = isinstance(event, Report) and isinstance(event.content, Switched)
        return [event, JobChangeRequested("stop", JobStop(job_id="job-1"))] if is_switched else [event]

    sim.channel = channel
    sim.run(until=10)
    assert sim.records["job-1"].state is JobState.STOPPED
    assert sim.members("job-1") == ()
