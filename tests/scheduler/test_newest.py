"""What policies keep of a job is what they would compute again."""

from dataclasses import replace
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from resile_scheduler.policies import newest as module
from resile_scheduler.policies.demand import BatchRange, Demand, Target
from resile_scheduler.policies.newest import newest
from resile_scheduler.policies.table import POLICIES
from resile_scheduler.policies.throughput import Line, Throughput
from resile_shared.policies import PolicyName


def test_a_result_is_kept_for_this_very_demand_and_equal_arguments() -> None:
    calls: list[tuple[Demand, int]] = []

    @newest
    def result(demand: Demand, number: int = 0) -> int:
        calls.append((demand, number))
        return len(calls)

    one, other = Demand("job-1", 1, 5000, 1, 4), Demand("job-2", 2, 5000, 1, 4)
    assert [result(one), result(other), result(one), result(other)] == [1, 2, 1, 2]
    assert [result(one, 1), result(one, 1), result(one, number=1), result(one, 2)] == [3, 3, 4, 5]
    assert result(replace(other, priority=1)) == 6
    assert result(other) == 7, "the newest only"
    assert calls[-1] == (other, 0)


def test_results_are_kept_for_a_limited_number_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_JOBS", 3)
    calls: list[str] = []
    result = newest(lambda demand: calls.append(demand.job))
    jobs = [Demand(f"job-{number}", number, 5000, 1, 4) for number in range(5)]
    for job in (*jobs, *jobs):
        result(job)
    assert len(calls) > len(jobs)


def _demand(number: int, rng: Random) -> Demand:
    workers = rng.choice([0, 1, 2, 4])
    line, exchange = Line(rng.random(), rng.random() / 10), Line(rng.random() / 10, rng.random() / 100)
    return Demand(
        f"job-{number}",
        number,
        rng.choice([100, 5000]),
        least=rng.choice([1, 2]),
        most=rng.choice([2, 6, 12]),
        num_shards=rng.choice([None, 8]),
        holds_slots=workers > 0,
        assigned_workers=workers,
        iteration=rng.choice([0, 900]),
        iterations_total=1000,
        batch_size=64,
        sizes=rng.choice([None, None, (2, 4, 5)]),
        batch=rng.choice([None, BatchRange(32, 512, least_per_slot=rng.choice([1, 16]))]),
        throughput=rng.choice([None, Throughput(None, line, exchange, exchange, num_measured=2)]),
        slots_per_host=rng.choice([None, 4]),
        is_scattered=rng.random() < 0.3,
        noise_scale=rng.choice([None, 100.0]),
        attained=rng.choice([0.0, 4096.0]),
        deadline_seconds=rng.choice([None, None, 100.0]),
        change_seconds=rng.choice([0.0, 20.0]),
    )


def _given(targets: dict[str, Target]) -> list[Target]:
    return [replace(target, reason="") for target in targets.values()]


@given(name=st.sampled_from(sorted(POLICIES)), seed=st.integers(0, 1 << 30))
@settings(max_examples=200, deadline=None)
def test_a_policy_decides_as_if_it_had_seen_no_job_before(name: PolicyName, seed: int) -> None:
    rng, policy = Random(seed), POLICIES[name]
    demands = [_demand(number, rng) for number in range(1, rng.randint(2, 7))]
    num_slots = rng.randint(0, 20)
    for turn in range(5):
        unseen = [replace(demand, job=f"{seed}-{turn}-{demand.number}") for demand in demands]
        assert _given(policy(demands, num_slots)) == _given(policy(unseen, num_slots))
        changed = rng.randrange(len(demands))
        demands[changed] = _demand(demands[changed].number, rng)
        num_slots = rng.choice([num_slots, rng.randint(0, 20)])
        demands = demands[rng.random() < 0.3 :] or demands
