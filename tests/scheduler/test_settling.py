"""Policies for which a change of workers has a cost choose the same again, unless something else has changed.

Otherwise slots would be given and taken back without end.
"""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from resile_scheduler.policies.demand import BatchRange, Demand, Policy
from resile_scheduler.policies.elastic_batch import elastic_batch
from resile_scheduler.policies.goodput import goodput
from resile_scheduler.policies.table import POLICIES
from resile_scheduler.policies.throughput import Line, Throughput
from resile_scheduler.simulation.simulated_pool import SimulatedPool
from resile_shared.messages.commands import PoolPolicy
from resile_shared.policies import PolicyName

from .test_groups import submit
from .test_simulator import spec

SECONDS = st.floats(0.001, 0.5)
MEASURED = st.builds(
    Throughput,
    compute=st.builds(Line, SECONDS, SECONDS),
    exchange=st.builds(Line, SECONDS, SECONDS),
    exchange_across=st.builds(Line, SECONDS, SECONDS),
    num_measured=st.just(4),
)


@st.composite
def demands(draw: st.DrawFn) -> list[Demand]:
    def demand(number: int) -> Demand:
        least = draw(st.integers(1, 3))
        return Demand(
            job=f"job-{number}",
            number=number,
            priority=draw(st.sampled_from((1000, 5000, 10_000))),
            least=least,
            most=least + draw(st.integers(0, 8)),
            num_shards=draw(st.sampled_from((None, 4, 16))),
            holds_slots=True,
            assigned_workers=draw(st.integers(0, 6)),
            batch_size=16,
            batch=draw(st.sampled_from((None, BatchRange(16, 512)))),
            throughput=draw(st.one_of(st.none(), MEASURED)),
            most_measured=draw(st.sampled_from((0, 1, 4))),
            slots_per_host=draw(st.sampled_from((None, 2, 4))),
            noise_scale=draw(st.sampled_from((None, 200.0))),
            change_seconds=draw(st.sampled_from((0.0, 0.5, 60.0))),
            iterations_total=draw(st.sampled_from((None, 100, 100_000))),
        )

    return [demand(number) for number in range(1, 1 + draw(st.integers(1, 4)))]


@pytest.mark.parametrize("policy", [goodput, elastic_batch])
@given(demands(), st.integers(1, 16))
def test_a_policy_that_is_asked_again_with_what_it_gave_comes_to_an_end(
    policy: Policy, jobs: list[Demand], num_slots: int
) -> None:
    def changed(job: Demand) -> Demand:
        target = targets[job.job]
        return replace(job, assigned_workers=target.workers, batch_size=target.batch_size or job.batch_size)

    for _ in range(5):
        targets = policy(jobs, num_slots)
        before, jobs = jobs, [changed(job) for job in jobs]
        if jobs == before:
            return
    raise AssertionError("it does not settle")


def test_a_job_that_avoids_a_host_is_compared_with_what_it_was_assigned() -> None:
    """Compared with the workers that it has, the same policy may choose something else, and then this again."""
    sim = SimulatedPool(policies=POLICIES, chosen=PoolPolicy(policy=PolicyName.ELASTIC_BATCH))
    sim.restart_scheduler()
    for name in ("host-1", "host-2", "host-3"):
        sim.add_host(name, 1)
    submit(sim, spec(most=1), spec(most=2))
    sim.run(until=30.0)
    pool, view = sim.scheduler._pool, sim.scheduler._decisions._views["job-2"]
    last = view.held[-1]
    while not view.avoided:  # its workers there are killed as they start
        _, number = pool.holders[last]
        sim.kill("job-2", number)
        while pool.holders.get(last) == ("job-2", number):
            sim.step()
    assert len(view.held) == 1
    assert view.target is not None
    assert view.target.workers == view.demand.assigned_workers == 2
