"""Workloads under policies in simulated time: what they come to, and the same each time."""

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from resile_scheduler.core.core import Scheduler
from resile_scheduler.core.events import Command, Event, StateRestored, Tick, WriteAllocation
from resile_scheduler.policies.table import POLICIES
from resile_scheduler.simulation.figures import figures_of
from resile_scheduler.simulation.outcome import Outcome
from resile_scheduler.simulation.simulate import Failures, Settings, delays_of, simulate
from resile_scheduler.simulation.simulated_pool import SimulatedPool
from resile_scheduler.simulation.sources import LOADS, read_trace, synthetic
from resile_scheduler.simulation.training import Modelled, Sharded
from resile_scheduler.simulation.workers import Delays
from resile_scheduler.simulation.workload import HostChange, Submission, UserRequest, Workload, equal_hosts
from resile_shared.errors import UsageError
from resile_shared.messages.commands import JobStop, PoolPolicy
from resile_shared.messages.hosts import HostState
from resile_shared.messages.jobs import JobSpec, JobState
from resile_shared.messages.reports import Progress, Report
from resile_shared.policies import PolicyName

from . import traces

FAIRSHARE = Settings(PolicyName.FAIRSHARE)
TWO_HOSTS = equal_hosts(8, 2)


def submission(
    time: float, number: int, iterations: int, *, deadline: float | None = None, **limits: int
) -> Submission:
    spec = JobSpec.model_validate({"name": f"{number}", "package": "p", "script": "s.py", "max_workers": 8} | limits)
    return Submission(time, f"job-{number}", spec, Sharded(iterations), checkpoint_seconds=5.0, deadline=deadline)


def sizes(outcome: Outcome) -> dict[str, list[int]]:
    return {job.submission.job: [workers for _, workers in job.steps] for job in outcome.jobs}


def test_the_story_of_the_two_jobs_comes_out_of_its_history(tmp_path: Path) -> None:
    """8, then 4 and 4, then 3 and 5, then 8, at the times at which it happened."""
    workload = read_trace(str(traces.write(tmp_path, traces.story())))
    outcome = simulate(workload, Settings(PolicyName.FAIRSHARE, delays=delays_of(workload, None)))
    assert sizes(outcome) == {"job-1": [8, 4, 3, 0], "job-2": [4, 5, 8, 0]}
    times = [[time for time, _ in job.steps] for job in outcome.jobs]
    assert times[0] == pytest.approx([2, 17, 47, 87], abs=1.5)
    assert times[1] == pytest.approx([18, 48, 88, 118], abs=1.5)


def test_another_policy_shares_the_slots_of_a_history_differently(tmp_path: Path) -> None:
    workload = read_trace(str(traces.write(tmp_path, traces.story())))
    assert sizes(simulate(workload, Settings(PolicyName.FIFO))) == {"job-1": [8, 0], "job-2": [8, 0]}


def test_a_simulation_is_deterministic_and_a_seed_changes_it() -> None:
    workload = replace(synthetic("bursty", num_slots=8, hours=1.0, seed=3), hosts=TWO_HOSTS)
    settings = replace(FAIRSHARE, failures=Failures(0.5))
    first, again = (simulate(workload, settings) for _ in range(2))
    assert first == again
    assert simulate(workload, replace(settings, seed=1)) != first
    assert synthetic("bursty", num_slots=8, hours=1.0, seed=4) != synthetic("bursty", num_slots=8, hours=1.0, seed=3)


@pytest.mark.parametrize("policy", PolicyName)
@pytest.mark.parametrize("load", LOADS)
def test_all_jobs_of_a_load_complete_under_every_policy_though_hosts_fail(policy: PolicyName, load: str) -> None:
    workload = replace(synthetic(load, num_slots=8, hours=0.5, seed=0), hosts=TWO_HOSTS)
    outcome = simulate(workload, Settings(policy, failures=Failures(1.0)))
    assert {job.state for job in outcome.jobs} == {JobState.COMPLETED}
    assert all(sum(1 for _, number in job.steps if not number) for job in outcome.jobs)


def test_time_without_a_job_is_left_out_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten years between two jobs; the second is served as it is without the first."""
    ticks = 0
    handle = Scheduler.handle

    def counted(self: Scheduler, event: Event, *, now: float) -> list[Command]:
        nonlocal ticks
        ticks += isinstance(event, Tick)
        assert ticks < 100
        return handle(self, event, now=now)

    monkeypatch.setattr(Scheduler, "handle", counted)
    late = 10 * 365 * 86400.0
    workload = Workload((submission(0, 1, 1000), submission(late, 2, 1000)), hosts=TWO_HOSTS)
    outcome = simulate(workload, FAIRSHARE)
    alone = simulate(Workload((submission(0, 2, 1000),), hosts=TWO_HOSTS), FAIRSHARE)
    assert [(time - late, workers) for time, workers in outcome.jobs[1].steps] == [
        pytest.approx(step) for step in alone.jobs[0].steps
    ]


def test_a_host_that_fails_costs_what_was_not_saved_and_comes_back() -> None:
    """The job's only host crashes: it starts again from its checkpoint, and completes later."""
    alone = Workload((submission(0, 1, 1000),), hosts=equal_hosts(8, 1))
    broken = replace(
        alone, hosts=(*alone.hosts, HostChange(20, "host-1", HostState.LOST), HostChange(30, "host-1", HostState.UP, 8))
    )
    undisturbed, disturbed = (simulate(workload, FAIRSHARE) for workload in (alone, broken))
    assert 12 <= disturbed.end - undisturbed.end <= 20
    assert figures_of(disturbed).utilization < figures_of(undisturbed).utilization


def test_a_change_costs_training_time() -> None:
    workload = Workload((submission(0, 1, 1000), submission(5, 2, 1000)), hosts=TWO_HOSTS)
    cheap, dear = (simulate(workload, replace(FAIRSHARE, delays=Delays(change=seconds))).jobs for seconds in (0.0, 5.0))
    later = [costly.ended - job.ended for costly, job in zip(dear, cheap, strict=True) if costly.ended and job.ended]
    assert later == pytest.approx([5.0, 5.0 + 2.5], abs=0.2), "job 2 grows 5 s later, too, and trains half as fast then"


def test_figures_of_a_simulation_that_can_be_computed_by_hand() -> None:
    """One job of 24 shards of 10 ms on 8 slots, then one that is stopped, then one that can never run."""
    workload = Workload(
        submissions=(
            submission(0, 1, 1000, deadline=40.0),
            submission(50, 2, 1000, deadline=60.0),
            submission(90, 3, 1, min_workers=9, max_workers=9),
        ),
        requests=(UserRequest(60.0, JobStop(job_id="job-2")),),
        hosts=TWO_HOSTS,
    )
    outcome = simulate(workload, replace(FAIRSHARE, delays=Delays(fork=0.0, script=1.0, exit=0.0)))
    figures = figures_of(outcome)
    assert (figures.jobs, figures.completed, figures.dropped) == (3, 1, 2)
    assert (figures.deadlines, figures.deadlines_met) == (2, 1)
    assert figures.mean_seconds == figures.median_seconds == figures.p99_seconds == pytest.approx(31.0)
    assert figures.mean_wait_seconds == pytest.approx(1.0)
    assert figures.fairness_median == figures.fairness_worst == pytest.approx(31 / 30)
    assert figures.jain == 1.0
    assert figures.changes == 0
    assert figures.utilization == pytest.approx((30 + 9) / outcome.end)


def test_jobs_that_wait_are_less_fairly_treated() -> None:
    many = Workload(tuple(submission(0, number, 500) for number in range(1, 6)), hosts=TWO_HOSTS)
    fifo, fair = (figures_of(simulate(many, Settings(policy))) for policy in (PolicyName.FIFO, PolicyName.FAIRSHARE))
    assert (fifo.jain or 0.0) < 0.9 < (fair.jain or 0.0)
    assert fair.changes > fifo.changes


def test_there_has_to_be_something_to_simulate() -> None:
    with pytest.raises(UsageError, match="at least one job and one host"):
        simulate(Workload((), hosts=TWO_HOSTS), FAIRSHARE)


def test_progress_is_told() -> None:
    told: list[tuple[int, float]] = []
    workload = replace(synthetic("high", num_slots=16, hours=1.0, seed=0), hosts=equal_hosts(16, 2))
    simulate(workload, FAIRSHARE, on_progress=lambda ended, seconds: told.append((ended, seconds)))
    assert told == sorted(told)
    assert told[-1][0] <= len(workload.submissions)


def test_the_history_of_a_real_pool_gives_the_same_sizes_at_nearly_the_same_times() -> None:
    """The story of the demo, recorded on a pool of two hosts, one of which was killed and came back."""
    path = Path(__file__).parent / "data" / "demo-history.jsonl"
    recorded: dict[str, list[tuple[float, int]]] = {}
    events = [json.loads(line)["data"] for line in path.read_text().splitlines()]
    times = [datetime.fromisoformat((event.get("item") or event).get("time", "9999-01-01T00:00Z")) for event in events]
    for event, time in zip(events, times, strict=True):
        if event.get("item", {}).get("kind") in ("allocation", "completed"):
            workers = event["item"]["workers"] if event["item"]["kind"] == "allocation" else 0
            recorded.setdefault(event["job"], []).append(((time - min(times)).total_seconds(), workers))
    workload = read_trace(str(path))
    outcome = simulate(workload, Settings(PolicyName.FAIRSHARE, delays=delays_of(workload, None)))
    for job in outcome.jobs:
        steps = recorded[job.submission.job]
        assert [workers for _, workers in job.steps] == [workers for _, workers in steps]
        assert [time for time, _ in job.steps] == pytest.approx([time for time, _ in steps], abs=6.0)


def test_what_a_simulated_core_decides_follows_from_its_events_alone() -> None:
    """Another core that gets the same events at the same times, as a service would, returns the same commands."""
    pool = SimulatedPool(policies=POLICIES, chosen=PoolPolicy(policy=PolicyName.FAIRSHARE))
    handled: list[tuple[Event, float, list[Command]]] = []
    handle = pool.scheduler.handle

    def recorded(event: Event, *, now: float) -> list[Command]:
        commands = handle(event, now=now)
        handled.append((event, now, commands))
        return commands

    pool.scheduler.handle = recorded  # type: ignore[method-assign]
    pool.handle(StateRestored())
    for host in ("host-1", "host-2"):
        pool.add_host(host, 4)
    pool.submit([submission(0, 1, 400), submission(5, 2, 900)])
    pool.later(8, lambda: pool.crash("host-2"))
    pool.run()
    real = Scheduler(secret="simulated", policies=POLICIES, chosen=PoolPolicy(policy=PolicyName.FAIRSHARE))
    assert all(real.handle(event, now=now) == commands for event, now, commands in handled)
    assert any(isinstance(command, WriteAllocation) for _, _, commands in handled for command in commands)


def test_what_workers_measure_is_of_the_workers_that_trained() -> None:
    """A job whose workers change before it has measured anything reports nothing of the ones before."""
    pool = SimulatedPool()
    reports: list[Report] = []

    def recorded(event: Event) -> list[Event]:
        reports.extend([event] if isinstance(event, Report) else [])
        return [event]

    pool.channel = recorded
    pool.add_host("host-1", 8)
    jobs = [(submission(0, 1, 1), 100), (submission(15, 2, 1), 200)]
    pool.submit(replace(job, training=Sharded(iterations, shard_seconds=1.0)) for job, iterations in jobs)
    pool.run()
    measured = [report.content.measurement for report in reports if isinstance(report.content, Progress)]
    taken = [(found.workers, found.compute_seconds) for found in measured if found]
    assert taken == [(4, 6.0), (4, 6.0), (8, 3.0)]


def test_a_batch_that_an_order_names_is_that_of_the_iterations() -> None:
    workload = replace(synthetic("low", num_slots=8, hours=0.5, seed=0), hosts=TWO_HOSTS)
    pool = SimulatedPool()
    for host in ("host-1", "host-2"):
        pool.add_host(host, 4)
    job = workload.submissions[0]
    assert isinstance(job.training, Modelled)
    pool.submit([replace(job, time=0.0)])
    pool.run(until=2.0)
    slow = pool.iteration("job-1")
    pool.run(until=12.0)
    slow = pool.iteration("job-1") - slow
    allocation = pool.allocations[-1]
    pool._execute(WriteAllocation(allocation.model_copy(update={"generation": 99, "batch_size": 512})))
    pool.run(until=13.0)
    begun = pool.iteration("job-1")
    pool.run(until=23.0)
    workers = (len(allocation.placements) // 2,) * 2
    expected = [job.training.pace(workers, batch, 0.0).seconds for batch in (64, 512)]
    assert slow / (pool.iteration("job-1") - begun) == pytest.approx(expected[1] / expected[0], rel=0.1)


def test_the_scheduler_sees_deadlines() -> None:
    """Without a deadline job 2 shares the slots; with one that this would miss, it gets what it needs."""
    long, urgent = submission(0, 1, 20_000), submission(5, 2, 3000)
    goodput = Settings(PolicyName.GOODPUT)
    _, without = simulate(Workload((long, urgent), hosts=TWO_HOSTS), goodput).jobs
    _, wished = simulate(Workload((long, replace(urgent, deadline=165.0)), hosts=TWO_HOSTS), goodput).jobs
    assert without.ended is not None
    assert without.ended > 165.0
    assert wished.met_deadline
