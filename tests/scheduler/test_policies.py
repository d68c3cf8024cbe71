"""Who should have how many slots: the promises of every policy, and the worked examples of the design."""

from dataclasses import replace
from fractions import Fraction

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from resile_scheduler.policies.demand import BatchRange, Demand, Policy, Target
from resile_scheduler.policies.elastic_batch import elastic_batch
from resile_scheduler.policies.preemption import without_preemption
from resile_scheduler.policies.ranked import fairshare, fifo, priority
from resile_scheduler.policies.table import POLICIES
from resile_shared.policies import PolicyName

Job = tuple[int, int, int, int | None, bool]


def demand(number: int = 1, *, rank: int = 5000, least: int = 1, most: int = 100, shards: int | None = None) -> Demand:
    most = min(most, shards or most)
    return Demand(f"job-{number}", number, rank, min(least, most), most, shards)


def workers(targets: dict[str, Target]) -> list[int]:
    return [target.workers for target in targets.values()]


allowed = st.sets(st.integers(1, 12), min_size=1).map(lambda sizes: tuple(sorted(sizes)))


@st.composite
def demands(draw: st.DrawFn, *, shards: bool = True, sizes: bool = True) -> list[Demand]:
    jobs = []
    for number in range(1, draw(st.integers(0, 7)) + 1):
        num_shards = draw(st.none() | st.sampled_from([1, 2, 4, 6, 8, 12, 24])) if shards else None
        most = draw(st.integers(1, 12))
        least = draw(st.integers(1, most))
        jobs.append(
            replace(
                demand(number, rank=draw(st.integers(1, 10_000)), least=least, most=most, shards=num_shards),
                assigned_workers=draw(st.integers(0, 12)),
                sizes=draw(st.none() | allowed) if sizes else None,
            )
        )
    return [replace(job, holds_slots=job.assigned_workers > 0) for job in jobs]


def possible(job: Demand) -> list[int]:
    """The numbers of workers that the job may have."""
    return [size for size in job.sizes or range(1, 13) if job.least <= size <= job.most]


def keeps(job: Demand) -> int:
    """How many workers it keeps without preemption."""
    sizes = possible(job)
    return max((size for size in sizes if size <= max(sizes[0], job.assigned_workers)), default=0)


def policy_for(name: PolicyName, *, preemption: bool) -> Policy:
    return POLICIES[name] if preemption else without_preemption(POLICIES[name])


names = st.sampled_from(sorted(POLICIES))
policies = st.builds(lambda name, preemption: policy_for(name, preemption=preemption), names, st.booleans())
greedy = st.sampled_from([fairshare, fifo, priority])
"""They leave no slot idle that a job can take; `elastic-batch` does, if it would make no job faster."""
work_conserving = greedy | greedy.map(without_preemption)
slots = st.integers(0, 24)


def test_equal_priorities_share_equally() -> None:
    assert workers(fairshare([demand(1)], 8)) == [8]
    assert workers(fairshare([demand(1), demand(2)], 8)) == [4, 4]


def test_shares_follow_priority() -> None:
    assert workers(fairshare([demand(1), demand(2, rank=10_000)], 8)) == [3, 5]


def test_the_same_with_24_shards() -> None:
    both = [demand(1, shards=24), demand(2, rank=10_000, shards=24)]
    assert workers(fairshare(both, 8)) == [3, 5]
    assert workers(fairshare(both[1:], 8)) == [8]


def test_everyone_gets_one_while_slots_suffice() -> None:
    jobs = [demand(1, rank=1_000_000), *(demand(n, rank=1) for n in range(2, 9))]
    assert workers(fairshare(jobs, 8)) == [1] * 8
    targets = fairshare([*jobs, demand(9, rank=1)], 8)
    assert targets["job-9"] == Target(
        0, "waiting for a slot: the minimums of job-1, job-2, job-3 and 5 more leave fewer"
    )


def test_what_one_cannot_use_goes_to_the_others() -> None:
    assert workers(fairshare([demand(1, most=2), demand(2)], 8)) == [2, 6]
    assert workers(fairshare([demand(1, shards=3), demand(2), demand(3)], 12)) == [3, 5, 4]


def test_a_minimum_is_kept() -> None:
    assert workers(fairshare([demand(1), demand(2, least=6, rank=1)], 8)) == [2, 6]


def test_a_job_whose_minimum_exceeds_the_pool_waits_and_says_why() -> None:
    targets = fairshare([demand(1), demand(2, least=9)], 8)
    assert targets["job-1"].workers == 8
    assert targets["job-2"] == Target(0, "waiting for hosts: its minimum is 9 and it can have at most 8")


def test_no_job_is_preempted_for_a_new_one() -> None:
    running = replace(demand(1, least=6), holds_slots=True)
    assert workers(fairshare([running, demand(2, least=6, rank=9000)], 8)) == [8, 0]
    assert workers(priority([running, demand(2, least=6, rank=9000)], 8)) == [0, 8]


def test_a_slot_that_makes_nothing_faster_is_offered_to_others() -> None:
    assert workers(fairshare([demand(1, shards=8, rank=10_000), demand(2, rank=5_000)], 8)) == [4, 4]
    assert workers(fairshare([demand(1, shards=8)], 7)) == [7], "nobody else wants it"
    assert workers(fairshare([demand(1, shards=8), demand(2, shards=8)], 12)) == [8, 4], "one gains by both"


@pytest.mark.parametrize("policy", [fairshare, fifo, priority])
def test_a_job_has_no_more_workers_than_its_batch_has_samples_for(policy: Policy) -> None:
    jobs = [
        replace(demand(number, most=64, shards=64), batch_size=16, batch=BatchRange(8, 512, least_per_slot=2))
        for number in (1, 2)
    ]
    assert workers(policy(jobs, 64)) == [8, 8]
    assert workers(policy([replace(job, batch_size=512) for job in jobs], 64))[0] >= 32
    assert workers(policy([replace(jobs[0], least=12)], 64)) == [12], "as its user wants it"
    assert workers(policy([replace(jobs[0], sizes=(12, 24))], 64)) == [12], "none of its sizes is smaller"


def test_strict_priority_serves_the_first_first() -> None:
    assert workers(priority([demand(1, rank=1), demand(2, rank=9000, most=6), demand(3, rank=10)], 10)) == [1, 6, 3]


def test_the_first_in_line_takes_all_it_can_use() -> None:
    assert workers(fifo([demand(1, rank=1), demand(2, rank=9000)], 8)) == [8, 0]
    assert workers(fifo([demand(2, most=8), demand(1, most=5)], 8)) == [3, 5]
    assert workers(fifo([demand(1, shards=8), demand(2)], 7)) == [4, 3], "the first is no faster on 7 than on 4"
    assert workers(fifo([demand(1, shards=8), demand(2, least=4)], 7)) == [7, 0], "nobody else can use the rest"


def test_a_small_job_passes_one_whose_minimum_does_not_fit() -> None:
    targets = fifo([demand(1, most=5), demand(2, least=4), demand(3)], 8)
    assert workers(targets) == [5, 0, 3]
    assert targets["job-2"].reason == "waiting for 4 slots: job-1, job-3 leave fewer"
    assert workers(fifo([demand(2, least=4), demand(3)], 8)) == [8, 0], "when it fits, it takes the slots back"


def test_only_allowed_sizes_are_given_and_the_rest_goes_to_others() -> None:
    powers = replace(demand(1), sizes=(1, 2, 4, 8))
    assert workers(fairshare([powers, demand(2)], 10)) == [4, 6]
    assert workers(fifo([powers, demand(2)], 7)) == [4, 3]
    assert workers(priority([replace(powers, priority=9000), demand(2)], 7)) == [4, 3]
    assert workers(fairshare([replace(powers, num_shards=4)], 8)) == [8], "nobody else wants them"
    assert workers(fairshare([replace(powers, num_shards=4), demand(2)], 12)) == [4, 8]
    too_large = replace(demand(1, most=3), sizes=(4, 8))
    for policy in (fairshare, fifo, priority):
        assert policy([too_large], 8)["job-1"] == Target(
            0, "waiting for hosts: its minimum is 4 and it can have at most 3"
        )


@pytest.mark.parametrize("served", [fairshare, fifo, priority])
def test_without_preemption_a_job_keeps_what_it_has(served: Policy) -> None:
    policy = without_preemption(served)
    running = replace(demand(3, rank=1), holds_slots=True, assigned_workers=6)
    targets = policy([demand(1, rank=9000), demand(2, least=3), running], 8)
    assert [target.workers for target in targets.values()] == [2, 0, 6]
    assert targets["job-3"].reason == "it keeps what it has: preemption is off"
    assert targets["job-2"].reason == "waiting for 3 slots: preemption is off, and job-1, job-3 leave fewer"


@pytest.mark.parametrize("served", [fairshare, fifo, priority, elastic_batch])
def test_what_a_job_waits_for_says_which_others_cannot_be_preempted(served: Policy) -> None:
    running = replace(demand(1, most=2, least=2), holds_slots=True, assigned_workers=2)
    jobs = [replace(running, is_preemptible=False), demand(2, least=2)]
    reason = served(jobs, 3)["job-2"].reason
    assert reason.startswith("waiting for 2 slots: job-1 cannot be preempted, and ")
    assert reason.endswith("job-1 leave fewer")
    assert "preemption is off" in without_preemption(served)(jobs, 3)["job-2"].reason
    assert "preempt" not in served([running, demand(2, least=2)], 3)["job-2"].reason


def test_without_preemption_slots_that_are_gone_are_shared_by_the_policy() -> None:
    both = [replace(demand(n, rank=n * 1000), holds_slots=True, assigned_workers=4) for n in (1, 2)]
    assert workers(policy_for(PolicyName.PRIORITY, preemption=False)(both, 5)) == [1, 4]
    assert workers(policy_for(PolicyName.FIFO, preemption=False)(both, 5)) == [4, 1]
    assert workers(policy_for(PolicyName.FAIRSHARE, preemption=False)(both, 6)) == [2, 4]


def test_reasons_name_the_others() -> None:
    targets = fairshare([demand(1), demand(2)], 8)
    assert targets["job-1"].reason == "fair share with job-2"
    assert fairshare([demand(1, most=8)], 8)["job-1"].reason == "all it can use"
    assert fairshare([demand(1)], 0)["job-1"].reason == "waiting for a host: the pool has no slots"


@given(jobs=demands(), num_slots=slots, policy=policies)
def test_never_more_than_there_is_and_always_within_limits(jobs: list[Demand], num_slots: int, policy: Policy) -> None:
    targets = policy(jobs, num_slots)
    assert set(targets) == {job.job for job in jobs}
    assert sum(workers(targets)) <= num_slots
    for job in jobs:
        target = targets[job.job]
        assert target.workers in (0, *possible(job))
        assert target.reason


@given(jobs=demands(), num_slots=slots, policy=work_conserving)
def test_no_slot_is_idle_while_a_job_can_take_it(jobs: list[Demand], num_slots: int, policy: Policy) -> None:
    targets = policy(jobs, num_slots)
    idle = num_slots - sum(workers(targets))
    for job in jobs:
        got = targets[job.job].workers
        assert not any(got < size <= got + idle for size in possible(job))


@given(jobs=demands(), num_slots=slots, policy=greedy)
def test_no_useful_step_is_left_undone(jobs: list[Demand], num_slots: int, policy: Policy) -> None:
    """No job keeps slots that do not make it faster while they would another, except for its minimum."""
    targets = policy(jobs, num_slots)
    wasted = num_slots - sum(workers(targets))
    for job in jobs:
        got = targets[job.job].workers
        if job.num_shards and got > job.least:
            wasted += got - min(n for n in possible(job) if -(-job.num_shards // n) == -(-job.num_shards // got))
    for job in jobs:
        got = targets[job.job].workers
        if job.num_shards is None and job.sizes is None and 0 < got < job.most:
            assert wasted == 0


@settings(max_examples=300)
@given(
    jobs=demands(shards=False, sizes=False),
    num_slots=slots,
    policy=policies,
    more=st.integers(1, 10_000),
    data=st.data(),
)
def test_a_higher_priority_is_never_a_smaller_share(
    jobs: list[Demand], num_slots: int, policy: Policy, more: int, data: st.DataObject
) -> None:
    if not jobs:
        return
    job = data.draw(st.sampled_from(jobs))
    raised = [replace(one, priority=one.priority + more) if one is job else one for one in jobs]
    assert policy(raised, num_slots)[job.job].workers >= policy(jobs, num_slots)[job.job].workers


@given(jobs=demands(), num_slots=slots, policy=policies, data=st.data())
def test_the_order_in_which_jobs_are_given_does_not_matter(
    jobs: list[Demand], num_slots: int, policy: Policy, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(jobs))
    assert policy(jobs, num_slots) == policy(shuffled, num_slots)


@given(jobs=demands(), num_slots=slots, name=names)
def test_without_preemption_nothing_is_taken_for_another_job(
    jobs: list[Demand], num_slots: int, name: PolicyName
) -> None:
    policy = policy_for(name, preemption=False)
    targets = policy(jobs, num_slots)
    having = [job for job in jobs if job.holds_slots]
    kept = {job.job: keeps(job) for job in having}
    if sum(kept.values()) <= num_slots:
        assert all(targets[job].workers >= kept[job] for job in kept)


@given(jobs=demands(), num_slots=slots, served=greedy)
def test_without_preemption_slots_that_disappear_are_not_made_up_for_by_another_job(
    jobs: list[Demand], num_slots: int, served: Policy
) -> None:
    policy = without_preemption(served)
    having = [job for job in jobs if job.holds_slots]
    targets, alone = policy(jobs, num_slots), policy(having, num_slots)
    for job in having:
        assert targets[job.job].workers >= min(keeps(job), alone[job.job].workers), "it loses nothing to new jobs"


@given(jobs=demands(), num_slots=slots, name=names, data=st.data())
def test_without_preemption_nothing_is_taken_because_of_a_priority(
    jobs: list[Demand], num_slots: int, name: PolicyName, data: st.DataObject
) -> None:
    policy = policy_for(name, preemption=False)
    given = policy(jobs, num_slots)
    now = [replace(j, holds_slots=n > 0, assigned_workers=n) for j in jobs for n in (given[j.job].workers,)]
    changed = [replace(job, priority=data.draw(st.integers(1, 10_000))) for job in now]
    then = policy(changed, num_slots)
    leaves_slots_free = name in (PolicyName.ELASTIC_BATCH, PolicyName.GOODPUT)  # they gain too little by them
    if sum(workers(given)) == num_slots or not leaves_slots_free:
        assert workers(then) == workers(given), "nothing is free, so nothing changes"
    assert all(then[job].workers >= target.workers for job, target in given.items())


@given(jobs=demands(), num_slots=slots, policy=st.sampled_from([fairshare, priority]))
def test_no_job_waits_while_all_minimums_fit(jobs: list[Demand], num_slots: int, policy: Policy) -> None:
    able = [job for job in jobs if possible(job)]
    if sum(possible(job)[0] for job in able) <= num_slots:
        assert all(workers(policy(able, num_slots)))


@given(jobs=demands(), num_slots=slots, policy=greedy)
def test_a_job_that_waits_could_not_have_had_its_minimum(jobs: list[Demand], num_slots: int, policy: Policy) -> None:
    """Slots are not kept for a job that has only a part of its minimum: nobody waits for what nobody uses."""
    targets = policy(jobs, num_slots)
    waiting = [job for job in jobs if possible(job) and not targets[job.job].workers]
    assert all(possible(job)[0] > num_slots - sum(workers(targets)) for job in waiting)


@given(jobs=demands(shards=False, sizes=False), num_slots=slots)
def test_fair_shares_are_within_a_slot_of_the_ideal(jobs: list[Demand], num_slots: int) -> None:
    """The ideal rises with one level for all, ``clamp(level * priority, least, most)``: no job is a slot apart from it.

    So no slot could move from one job to another and leave both nearer to a common level.
    """
    shares = {job.job: target for job, target in zip(jobs, workers(fairshare(jobs, num_slots)), strict=True)}
    having = [job for job in jobs if shares[job.job]]
    for rich in having:
        for poor in having:
            if shares[rich.job] > rich.least and shares[poor.job] < poor.most:
                level_of_rich = Fraction(shares[rich.job] - 1, rich.priority)
                level_of_poor = Fraction(shares[poor.job] + 1, poor.priority)
                assert level_of_rich < level_of_poor


@settings(max_examples=300)
@given(jobs=demands(shards=False), num_slots=slots)
def test_no_single_step_makes_fair_shares_fairer(jobs: list[Demand], num_slots: int) -> None:
    """With allowed sizes: no job can step down to its next size so that another one steps up, and both are nearer."""
    shares = {job.job: target for job, target in zip(jobs, workers(fairshare(jobs, num_slots)), strict=True)}
    idle = num_slots - sum(shares.values())
    having = [job for job in jobs if shares[job.job]]
    for rich in having:
        less = max((size for size in possible(rich) if size < shares[rich.job]), default=None)
        for poor in having:
            more = min((size for size in possible(poor) if size > shares[poor.job]), default=None)
            if less is None or more is None or more - shares[poor.job] > shares[rich.job] - less + idle:
                continue
            assert Fraction(less, rich.priority) < Fraction(more, poor.priority)


@pytest.mark.parametrize("policy", [fairshare, fifo, priority])
def test_a_large_pool_is_quick(policy: Policy) -> None:
    jobs = [demand(number, rank=number, most=50) for number in range(1, 101)]
    assert sum(workers(policy(jobs, 2000))) == 2000
