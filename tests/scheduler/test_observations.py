"""What jobs measure reaches policies, and what these decide reaches the jobs: sizes and batches."""

import random
from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from resile_scheduler.core.core import Scheduler
from resile_scheduler.core.events import Tick, WriteAllocation
from resile_scheduler.core.observation_timer import GROWTH_SECONDS
from resile_scheduler.core.state.observations import CHANGE_SECONDS, OBSERVE_SECONDS, Observer
from resile_scheduler.policies.changes import MOST_LOST, lost_share, seconds_left
from resile_scheduler.policies.demand import BatchRange, Demand, Policy, Target
from resile_scheduler.policies.elastic_batch import elastic_batch
from resile_scheduler.policies.goodput import goodput
from resile_scheduler.policies.ranked import fairshare
from resile_scheduler.policies.stable_fit import StableFit
from resile_scheduler.policies.throughput import Line, Measurement, Throughput
from resile_shared.messages import reports
from resile_shared.messages.hosts import HostState
from resile_shared.messages.jobs import JobState
from resile_shared.messages.message import at
from resile_shared.messages.reports import Progress, Ready, Report, Switched

from .test_core import Bench, gone, ready, worker
from .test_recovery import member

RANGE = reports.BatchRange(least=192, most=1536)


class MeasuredBench(Bench):
    """A pool under `elastic_batch`, whose jobs measure what ``exchange`` says."""

    def __init__(self, *slots: int, policy: Policy = elastic_batch, **fields: float) -> None:
        super().__init__()
        self.scheduler = Scheduler(epoch=1, secret="s", policy=policy)
        for number, num_slots in enumerate(slots, start=1):
            self.host(f"host-{number}", num_slots)
        self.exchange = fields.get("exchange", 0.05)

    def start(
        self, *, job: str = "job-1", batch_range: reports.BatchRange | None = RANGE, num_shards: int = 24
    ) -> None:
        self.listen(job=job)
        first = self.newest(job).placements[0]
        self.report(self.ready(batch_range, num_shards), worker=first.worker, job=job)
        self.switch(job=job)

    def ready(self, batch_range: reports.BatchRange | None = RANGE, num_shards: int = 24) -> Ready:
        return ready(num_shards).model_copy(update={"batch_range": batch_range, "iterations_total": 100_000})

    def measure(self, *, job: str = "job-1", iteration: int = 10, times: int = 4) -> None:
        newest = self.newest(job)
        workers, batch = len(newest.placements), newest.batch_size or 192
        measured = reports.Measurement(
            workers=workers,
            hosts=1,
            batch_size=batch,
            iterations=10,
            compute_seconds=0.001 * batch / workers,
            exchange_seconds=self.exchange if workers > 1 else 0.0,
        )
        progress = Progress(iteration=iteration, epoch=0, measurement=measured, noise_scale=500.0)
        for _ in range(times):
            self.report(progress, worker=newest.placements[0].worker, generation=newest.generation, job=job)

    def tick(self, seconds: float) -> list[WriteAllocation]:
        self.now += seconds
        return [command for command in self.tell_once(Tick()) if isinstance(command, WriteAllocation)]


@pytest.mark.parametrize("policy", [elastic_batch, goodput])
def test_a_job_trains_with_its_minimum_though_each_worker_has_few_samples(policy: Policy) -> None:
    """Else it would wait for good, and without preemption slots would be kept for it."""
    bench = MeasuredBench(4, policy=policy)
    bench.submit(min_workers=4, max_workers=4)
    bench.listen()
    few = {"batch_size": 6, "batch_range": reports.BatchRange(least=4, most=6, least_per_slot=2)}
    bench.report(ready(8).model_copy(update=few), worker=bench.newest().placements[0].worker)
    bench.switch()
    assert len(bench.newest().placements) == 4
    assert bench.records["job-1"].state in (JobState.RUNNING, JobState.RESCALING), "another batch may be on its way"


def test_a_batch_alone_changes_with_a_generation_of_the_same_members() -> None:
    bench = MeasuredBench(4)
    bench.submit(max_workers=4)
    bench.start()
    bench.tick(1.0)
    assert bench.newest().batch_size is None, "as in the training call"
    bench.measure()
    before = bench.newest()
    assert bench.tick(GROWTH_SECONDS / 2) == [], "policies see what is measured from time to time"
    (written,) = bench.tick(GROWTH_SECONDS / 2)
    allocation = written.allocation
    assert allocation.placements == before.placements
    assert allocation.batch_size == 1483
    assert allocation.generation == before.generation + 1
    bench.switch(iteration=20)
    item = bench.histories["job-1"][-1]
    assert (item.workers, item.batch_size) == (4, 1483)
    assert item.reason.startswith("batch of 1483: all it can use: ")
    assert item.reason.endswith(" times as fast as on 1 slot with a batch of 192")
    assert bench.tick(10 * OBSERVE_SECONDS) == [], "nothing more is measured, and nothing moves"


def test_what_more_workers_than_ever_measure_is_seen_soon_and_all_else_later() -> None:
    seen: list[Throughput | None] = []
    most: list[int] = []

    def policy(demands: Sequence[Demand], num_slots: int) -> dict[str, Target]:
        seen.extend(demand.throughput for demand in demands)
        most.extend(demand.most_measured for demand in demands)
        return elastic_batch(demands, num_slots)

    bench = MeasuredBench(4, policy=policy)
    bench.submit(max_workers=4)
    bench.start(batch_range=None)
    bench.tick(1.0)
    bench.measure(times=1)
    assert (seen[-1], most[-1]) == (None, 0)
    bench.tick(GROWTH_SECONDS)
    first = seen[-1]
    assert first is not None
    assert most[-1] == 4
    bench.exchange = 0.5
    bench.measure(times=8)
    bench.tick(GROWTH_SECONDS)
    assert seen[-1] == first, "it may be jitter"
    bench.tick(OBSERVE_SECONDS)
    assert seen[-1] != first


@pytest.mark.parametrize(("placement", "is_scattered"), [("pack", False), ("spread", True)])
def test_policies_see_whether_workers_are_on_several_hosts(placement: str, is_scattered: bool) -> None:
    seen: list[Sequence[Demand]] = []

    def observed(demands: Sequence[Demand], num_slots: int) -> dict[str, Target]:
        seen.append(demands)
        return goodput(demands, num_slots)

    bench = MeasuredBench(2, 2, policy=observed)
    bench.submit(max_workers=2, placement=placement)
    bench.start()
    (demand,) = seen[-1]
    assert (demand.assigned_workers, demand.slots_per_host, demand.is_scattered) == (2, 2, is_scattered)


def test_a_job_of_a_fixed_batch_is_never_given_one_and_shares_as_if_batches_were_unknown() -> None:
    bench, fixed = MeasuredBench(8), MeasuredBench(8)
    for pool, batch_range in ((bench, None), (fixed, reports.BatchRange(least=192, most=192))):
        for number in (1, 2):
            pool.submit(number, max_workers=4 * number)
            pool.start(job=f"job-{number}", batch_range=batch_range)
            pool.measure(job=f"job-{number}")
        pool.tick(1.0)
        pool.tick(OBSERVE_SECONDS)
    assert all(allocation.batch_size is None for allocation in bench.allocations)
    sizes = [[(a.job, len(a.placements)) for a in pool.allocations] for pool in (bench, fixed)]
    assert sizes[0] == sizes[1]


def test_a_recovery_leaves_the_batch_to_its_members_and_the_next_generation_says_it_again() -> None:
    bench = MeasuredBench(4)
    bench.submit(max_workers=4)
    bench.start()
    bench.measure()
    bench.tick(1.0)
    bench.switch(iteration=20)
    assert bench.newest().batch_size == 1483
    alive = [member(number, iteration=20, generation=2) for number in range(3)]
    bench.beat(*alive, gone(3, kind="killed"))
    assert (bench.newest().is_recovery, bench.newest().batch_size) == (True, None)
    bench.switch(iteration=21)
    assert bench.newest().batch_size == 1483
    assert not bench.newest().is_recovery


def test_a_batch_that_was_ordered_before_a_recovery_is_ordered_again() -> None:
    bench = MeasuredBench(2, 2)
    bench.submit(max_workers=4)
    for host in ("host-1", "host-2"):
        bench.beat(*(worker(p.worker, p.slot) for p in bench.newest().placements if p.host == host), host=host)
    bench.report(bench.ready(reports.BatchRange(least=192, most=400)))
    bench.switch()
    bench.measure()
    bench.tick(1.0)
    batch = bench.newest().batch_size
    assert batch is not None
    assert batch > 300
    bench.beat(*(member(number, iteration=20) for number in (0, 1)))
    bench.host("host-2", 2, state=HostState.LOST)
    assert (bench.newest().is_recovery, bench.newest().batch_size) == (True, None), "members may not have seen it"
    bench.switch(iteration=21)
    assert len(bench.newest().placements) == 2
    assert bench.newest().batch_size is not None


def test_what_a_change_costs_is_what_exceeds_the_iterations_between_two_reports() -> None:
    observer = Observer()

    def report(seconds: float, content: Progress | Switched) -> Report:
        return Report(
            job="job-1",
            host="h",
            incarnation=1,
            worker=0,
            slot=0,
            generation=1,
            time=at(1000 + seconds),
            content=content,
        )

    def seen() -> float:
        observer.observe(attained=0.0)
        return observer.observation.change_seconds

    assert seen() == CHANGE_SECONDS
    for second in (0, 1, 2):
        progress = Progress(iteration=10 * second, epoch=0)
        observer.on_progress(report(second, progress), progress, ready=ready(), is_changing=False)
    slow = Progress(iteration=22, epoch=0)
    observer.on_progress(report(4, slow), slow, ready=ready(), is_changing=True)
    switched = Switched(workers=(0, 1), iteration=30, pause_seconds=0.2)
    observer.on_switched(report(5.0, switched), switched)
    assert seen() == pytest.approx(2.0), "3 seconds for what takes 1"
    observer.on_switched(report(100.0, switched), Switched(workers=(0,), iteration=30, pause_seconds=1e9))
    observer.on_switched(report(100.0, switched), Switched(workers=(0,), iteration=30, pause_seconds=1e9))
    assert seen() == 60.0, "bounded"


def test_a_cost_or_a_noise_scale_that_hardly_differs_is_the_same() -> None:
    observer = Observer()

    def noise(scale: float) -> float | None:
        progress = Progress(iteration=1, epoch=0, noise_scale=scale)
        report = Report(
            job="job-1", host="h", incarnation=1, worker=0, slot=0, generation=1, time=at(1000), content=progress
        )
        observer.on_progress(report, progress, ready=ready(), is_changing=False)
        observer.observe(attained=0.0)
        return observer.observation.noise_scale

    assert [noise(scale) for scale in (100.0, 120.0, 81.0, 130.0, 120.0)] == [100.0, 100.0, 100.0, 130.0, 130.0]


def test_what_a_job_has_attained_is_seen_in_powers_of_two() -> None:
    bench = MeasuredBench(2, policy=fairshare)
    bench.submit(max_workers=2)
    bench.start()
    bench.tick(1.0)
    bench.tick(100.0)
    seen = bench.scheduler._pool.jobs["job-1"].observer.observation
    assert seen.attained == 128.0, "of 202"
    assert seen.change_seconds == CHANGE_SECONDS, "a start is no change"


def test_a_change_has_less_time_to_earn_its_cost_shortly_before_the_end() -> None:
    throughput = Throughput(compute=Line(0.0, 0.001), num_measured=1)
    job = Demand("job-1", 1, 5000, 1, 8, batch_size=100, assigned_workers=1, throughput=throughput, change_seconds=3.0)
    assert lost_share(job) == pytest.approx(0.01)
    late = replace(job, iteration=900, iterations_total=1000)
    assert seconds_left(late) == pytest.approx(10.0)
    assert seconds_left(late, 2) == pytest.approx(5.0)
    assert lost_share(late) == pytest.approx(0.3)
    assert lost_share(replace(late, iteration=1000)) == MOST_LOST


@pytest.mark.parametrize(("bits", "limit"), [("fast", 32), ("same bits", None)])
def test_in_fast_mode_the_most_samples_of_a_pass_are_known(bits: str, limit: int | None) -> None:
    observer = Observer()
    declared = ready(24).model_copy(update={"bits": bits, "micro_batch_size": 32})
    measured = reports.Measurement(
        workers=2, hosts=1, batch_size=192, iterations=10, compute_seconds=0.3, exchange_seconds=0.1
    )
    progress = Progress(iteration=10, epoch=0, measurement=measured)
    report = Report(
        job="job-1", host="h", incarnation=1, worker=0, slot=0, generation=1, time=at(1000.0), content=progress
    )
    observer.on_progress(report, progress, ready=declared, is_changing=False)
    assert observer.observe(attained=0.0)
    throughput = observer.observation.throughput
    assert throughput is not None
    assert throughput.micro_batch_size == limit
    assert throughput.seconds(2, 192) == pytest.approx(0.4, rel=0.02)


def test_a_fit_that_is_not_finite_is_none() -> None:
    fit = StableFit()
    fit.add(Measurement(4, 192, 1, 1e300, 1e300))
    assert fit.throughput is None
    fit = StableFit()
    fit.add(Measurement(4, 192, 1, 1.0, 0.5))
    known = fit.throughput
    fit.add(Measurement(2, 192, 1, 1e300, 1e300))
    assert fit.throughput == known


def test_seconds_of_one_configuration_are_those_of_many() -> None:
    throughput = Throughput(24, Line(0.1, 0.01), Line(0.2, 0.03), Line(0.5, 0.07), num_measured=3)
    for workers in (1, 2, 5, 24):
        for across in (False, True):
            assert throughput.seconds_of(workers, 96, across=across) == pytest.approx(
                float(throughput.seconds(workers, 96, across=across))
            )


class _Job:
    """A job whose iterations take what ``true`` says, give or take 20 %, and that is fitted as in the core."""

    def __init__(self, number: int, true: Throughput, jitter: random.Random) -> None:
        self.number, self.true, self.jitter = number, true, jitter
        self.fit = StableFit(true.num_shards, micro_batch_size=true.micro_batch_size)
        self.workers, self.batch = 0, 192

    def demand(self) -> Demand:
        return Demand(
            f"job-{self.number}",
            self.number,
            5000,
            1,
            12,
            holds_slots=self.workers > 0,
            assigned_workers=self.workers,
            batch_size=self.batch,
            batch=BatchRange(192, 1536),
            throughput=self.fit.throughput,
            noise_scale=1000.0,
            change_seconds=CHANGE_SECONDS,
            slots_per_host=8,
        )

    def train(self) -> None:
        if self.workers:
            hosts = 2 if self.workers > 8 else 1
            passes, samples = self.true.passes(self.workers, self.batch)
            compute = float(passes * self.true.compute.at(samples))
            exchange = float(self.true.seconds(self.workers, self.batch, across=hosts > 1)) - compute
            noise = self.jitter.uniform(0.8, 1.2), self.jitter.uniform(0.8, 1.2)
            self.fit.add(Measurement(self.workers, self.batch, hosts, compute * noise[0], exchange * noise[1]))


trues = st.builds(
    Throughput,
    num_shards=st.none() | st.just(24),
    compute=st.builds(Line, st.floats(0.0, 0.1), st.floats(1e-4, 0.01)),
    exchange=st.builds(Line, st.floats(0.0, 0.3), st.floats(0.0, 0.05)),
    exchange_across=st.builds(Line, st.floats(0.0, 0.5), st.floats(0.0, 0.1)),
)
trues |= trues.map(lambda of: replace(of, num_shards=None, micro_batch_size=48))


@settings(max_examples=10, deadline=None)
@given(
    true=st.lists(trues, min_size=2, max_size=3),
    policy=st.sampled_from([elastic_batch, goodput]),
    seed=st.integers(0, 2**32),
)
def test_measurements_that_jitter_by_a_fifth_do_not_move_slots_to_and_fro(
    true: list[Throughput], policy: Policy, seed: int
) -> None:
    """While jobs learn, they move a few times; then they keep their workers and their batches."""
    jobs = [_Job(number, throughput, random.Random(seed + number)) for number, throughput in enumerate(true)]
    changes: list[int] = []
    for turn in range(50):
        targets = policy([job.demand() for job in jobs], 16)
        for job in jobs:
            target = targets[f"job-{job.number}"]
            wanted = target.workers, target.batch_size or job.batch
            if wanted != (job.workers, job.batch):
                changes.append(turn)
            job.workers, job.batch = wanted
        for _ in range(6):  # a measurement each 5 seconds, a decision each 30
            for job in jobs:
                job.train()
    assert sum(turn >= 15 for turn in changes) <= 1, changes
