"""A plan: exactly so many workers from exactly these iterations on, whatever happens on the way."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given

from resile_scheduler.core.core import Scheduler
from resile_scheduler.core.events import JobChangeRequested, PolicyChanged, StateRestored
from resile_scheduler.policies.demand import Demand
from resile_scheduler.policies.plan import PlanPolicy, PlanStep
from resile_shared.messages.commands import JobPause
from resile_shared.messages.jobs import JobState
from resile_shared.messages.reports import Failed

from .test_core import Bench, gone, ready, worker

TOTAL = 100

DEMAND = Demand(job="job-1", number=0, priority=5000, least=1, most=8, num_shards=24, iterations_total=TOTAL)

ACTIVE = replace(DEMAND, active_workers=1)


def plan(text: str, **settings: bool) -> PlanPolicy:
    steps = (part.split(":") for part in text.split(","))
    return PlanPolicy(tuple(PlanStep(int(iteration), int(workers)) for iteration, workers in steps), **settings)


class PlannedBench(Bench):
    """A scheduler that follows a plan on one host."""

    def __init__(self, text: str, slots: int = 8, **settings: bool) -> None:
        super().__init__()
        self.scheduler = Scheduler(epoch=1, secret="s", policy=plan(text, **settings))
        self.host("host-1", slots)
        self.submit()

    def listen_all(self) -> None:
        """Let every worker of the newest allocation report its address."""
        self.beat(*(worker(p.worker, p.slot) for p in self.newest().placements))

    def start(self) -> None:
        self.listen_all()
        self.report(ready(), worker=0)
        self.switch()

    @property
    def shape(self) -> tuple[int, int, int | None]:
        newest = self.newest()
        return len(newest.placements), newest.not_before, newest.until


def test_each_step_is_prepared_as_soon_as_the_one_before_is_active() -> None:
    bench = PlannedBench("0:1,10:4,25:2")
    assert bench.shape == (1, 0, 10)
    bench.start()
    assert bench.shape == (4, 10, 25)
    bench.listen_all()
    bench.switch(iteration=10)
    assert bench.shape == (2, 25, None)
    bench.switch(iteration=25)
    assert bench.shape == (2, 25, None)
    assert [item.reason for item in bench.histories["job-1"] if item.kind == "allocation"] == [
        "start", "plan 10:4", "plan 25:2",
    ]  # fmt: skip


def test_a_step_waits_until_it_can_have_all_its_slots() -> None:
    bench = PlannedBench("0:4,10:1,11:4", slots=4)
    bench.start()
    bench.switch(iteration=10)
    bench.beat(worker(0, 0, state="member"), *(worker(n, n, state="left") for n in (1, 2)), gone(3, 3))
    assert bench.shape == (1, 10, 11), "one free slot is not enough for three joiners"
    bench.beat(worker(0, 0, state="member"))
    assert bench.shape == (4, 11, None)


def test_a_lost_worker_is_replaced_and_the_step_that_was_to_come_still_comes() -> None:
    bench = PlannedBench("0:3,10:1")
    bench.start()
    assert bench.shape == (1, 10, None)
    bench.beat(*(worker(n, n, state="member") for n in (0, 1)), gone(2, 2, kind="killed"))
    assert bench.newest().is_recovery
    assert bench.newest().until == 10
    bench.switch(iteration=4)
    assert bench.shape == (3, 0, 10)
    bench.listen_all()
    bench.switch(iteration=5)
    assert bench.shape == (1, 10, None)


def test_a_new_policy_supersedes_what_the_old_one_had_ordered() -> None:
    bench = PlannedBench("0:2,50:1", slots=16)
    bench.start()
    assert bench.shape == (1, 50, None)
    bench.tell(PolicyChanged(PlanPolicy((PlanStep(0, 3),), reason="resize to 3 workers"), "resize"))
    assert bench.shape == (3, 0, None)
    members = (worker(number, number, state="member") for number in range(2))
    bench.beat(*members, *(worker(p.worker, p.slot) for p in bench.newest().placements[1:]))
    bench.switch(iteration=7)
    assert bench.histories["job-1"][-1].reason == "resize to 3 workers"
    assert bench.shape == (3, 0, None)


def test_members_that_wait_for_a_step_that_no_longer_exists_are_released() -> None:
    bench = PlannedBench("0:2,50:1")
    bench.start()
    bench.tell(PolicyChanged(PlanPolicy((PlanStep(0, 2),)), "resize"))
    assert bench.shape[0] == 2
    assert bench.newest().until is None, "the active generation would wait at iteration 50"


def test_a_new_scheduler_goes_on_with_the_step_that_trains() -> None:
    bench = PlannedBench("0:1,10:4")
    bench.start()
    bench.listen_all()
    bench.switch(iteration=10)
    before = bench.newest()
    bench.scheduler = Scheduler(epoch=2, secret="s", policy=plan("0:1,10:4"))
    bench.tell(StateRestored(tuple(bench.records.values()), (before,), tuple(bench.hosts.values())))
    bench.beat(*(worker(p.worker, p.slot, state="member") for p in before.placements))
    assert bench.newest().generation == before.generation


def test_nobody_waits_at_a_step_that_changes_no_number_of_workers() -> None:
    bench = PlannedBench("0:2,50:2,80:1")
    assert bench.shape == (2, 0, 80)
    bench.start()
    assert bench.shape == (1, 80, None)


def test_a_resize_to_the_number_of_the_step_to_come_takes_effect_at_once() -> None:
    bench = PlannedBench("0:1,50:2")
    bench.start()
    assert bench.shape == (2, 50, None)
    bench.tell(PolicyChanged(PlanPolicy((PlanStep(0, 2),)), "resize"))
    assert bench.shape == (2, 0, None)


def test_more_workers_than_shards_fail_the_job() -> None:
    bench = PlannedBench("0:1,10:30", slots=30)
    bench.listen_all()
    bench.report(ready(24), worker=0)
    assert bench.records["job-1"].state is JobState.FAILED
    reason = bench.records["job-1"].reason
    assert "30 workers are too many: a batch of 192 samples is cut into 24 shards" in reason


def test_a_plan_that_fits_the_shards_is_cut_before_the_job_starts() -> None:
    bench = PlannedBench("0:4", fits_shards=True)
    bench.report(ready(2), worker=0)
    assert [p.worker for p in bench.newest().placements] == [0, 1]


def test_steps_that_fit_the_shards_alike_are_one_step() -> None:
    bench = PlannedBench("0:1,10:6,20:4,30:5,40:2", fits_shards=True)
    bench.listen_all()
    bench.report(ready(4), worker=0)
    bench.switch()
    assert bench.shape == (4, 10, 40)
    bench.listen_all()
    bench.switch(iteration=10)
    assert bench.shape == (2, 40, None)


def test_members_that_would_wait_at_a_step_that_the_shards_leave_out_train_on() -> None:
    bench = PlannedBench("0:4,10:6,20:2", fits_shards=True)
    assert bench.shape == (4, 0, 10)
    bench.listen_all()
    bench.report(ready(4), worker=0)
    bench.switch()
    assert bench.shape == (4, 0, 20)
    bench.switch()
    assert bench.shape == (2, 20, None)


def test_two_workers_that_cannot_join_fail_a_job_that_needs_them() -> None:
    bench = PlannedBench("0:1,10:2")
    bench.start()
    for attempt in range(2):
        assert bench.records["job-1"].state is not JobState.FAILED
        joiner = bench.newest().placements[-1]
        assert len(bench.newest().placements) == 2, "the only host is tried again at once"
        bench.report(Failed(message="no such file"), worker=joiner.worker)
        bench.beat(worker(0, 0, state="member"), gone(joiner.worker, joiner.slot, kind="failed"))
        if attempt == 0:
            bench.switch(iteration=3)
    assert bench.records["job-1"].state is JobState.FAILED


def test_a_paused_job_has_no_step() -> None:
    bench = PlannedBench("0:1,10:4")
    bench.start()
    allocation = bench.newest()
    bench.tell(JobChangeRequested("pause", JobPause(job_id="job-1")))
    assert bench.newest() == allocation


def test_a_step_beyond_the_end_neither_forms_a_generation_nor_counts_as_too_many_workers() -> None:
    bench = PlannedBench("0:1,200:30")
    bench.start()
    assert bench.newest().generation == 1
    assert bench.records["job-1"].state is JobState.RUNNING


def test_a_step_beyond_an_estimated_end_is_prepared_since_members_wait_for_it() -> None:
    target = plan("0:1,5:3,9:2")([replace(ACTIVE, iterations_total=2, has_fixed_length=False)], 8)["job-1"]
    assert (target.workers, target.not_before, target.until) == (3, 5, 9)
    target = plan("0:1,5:3")([replace(ACTIVE, iterations_total=5, has_fixed_length=False)], 8)["job-1"]
    assert (target.workers, target.not_before, target.until) == (3, 5, None)


@st.composite
def plans(draw: st.DrawFn, *, fits_shards: bool = False) -> PlanPolicy:
    later = draw(st.lists(st.integers(1, 150), unique=True, max_size=5))
    iterations = [0, *sorted(later)]
    return PlanPolicy(tuple(PlanStep(i, draw(st.integers(1, 24))) for i in iterations), fits_shards=fits_shards)


@given(plans(), st.integers(0, 99), st.integers(0, 24))
def test_a_target_is_what_the_plan_says_of_its_iteration(policy: PlanPolicy, since: int, active: int) -> None:
    demand = replace(DEMAND, iteration=since, active_since=since, active_workers=active)
    target = policy([demand], 8)["job-1"]
    at = max(target.not_before, since)
    assert target.workers == workers_at(policy.steps, at)
    assert target.until == next((i for i in changes_after(policy.steps, at) if i != TOTAL), None)
    if target.not_before:
        assert active, "what does not train yet cannot wait"


@given(plans(fits_shards=True), st.integers(1, 24))
def test_no_generation_waits_for_one_that_may_not_train_yet(policy: PlanPolicy, num_shards: int) -> None:
    fitted = [PlanStep(step.iteration, min(step.workers, num_shards)) for step in policy.steps]
    target = policy([replace(DEMAND, num_shards=None, iterations_total=None)], 8)["job-1"]
    trained = [(0, min(target.workers, num_shards))]
    known = replace(DEMAND, num_shards=num_shards)
    for _ in range(2 * len(policy.steps) + 2):
        until, (since, workers) = target.until, trained[-1]
        active = replace(known, active_since=since, active_workers=workers, active_until=until)
        target = policy([active], 8)["job-1"]
        if (target.workers, target.until) == (workers, until):
            break
        assert until is None or target.not_before <= until, "members wait at an iteration before that of the next step"
        trained.append((max(target.not_before, since), target.workers))
    assert target.until is None or target.until > TOTAL
    for iteration in range(TOTAL):
        assert [workers for since, workers in trained if since <= iteration][-1] == workers_at(fitted, iteration)


def workers_at(steps: Sequence[PlanStep], iteration: int) -> int:
    return [step for step in steps if step.iteration <= iteration][-1].workers


def changes_after(steps: Sequence[PlanStep], iteration: int) -> list[int]:
    pairs = pairwise(steps)
    return [new.iteration for old, new in pairs if new.iteration > iteration and new.workers != old.workers]
