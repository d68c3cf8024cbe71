"""Whatever a job reports within the schema, under any policy: the scheduler's core decides on, and starts again."""

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
from hypothesis import given
from pydantic import ValidationError

from resile_scheduler.core.events import StateRestored, Tick
from resile_scheduler.core.state.observations import OBSERVE_SECONDS
from resile_scheduler.policies.table import POLICIES
from resile_scheduler.simulation.simulated_pool import SimulatedPool
from resile_scheduler.simulation.training import Sharded
from resile_scheduler.simulation.workload import Submission
from resile_shared.messages.commands import PoolPolicy
from resile_shared.messages.jobs import JobSpec
from resile_shared.messages.message import at
from resile_shared.messages.reports import BatchRange, Measurement, Progress, Ready, Report, Switched
from resile_shared.policies import PolicyName

from .documents import allowed
from .fuzzing import fuzzed

LONG = Sharded(10**6)
LIMITS: list[dict[str, Any]] = [
    {"max_workers": 8},
    {"min_workers": 2, "max_workers": 8, "sizes": (2, 4, 8)},
    {"min_workers": 3, "max_workers": 3},
]


@dataclass(frozen=True)
class Claim(Submission):
    """A job whose script claims ``claimed`` at its training call."""

    claimed: Ready = field(kw_only=True)

    def ready(self) -> Ready:
        return self.claimed


def documents(
    model: type[Ready | Progress | Switched], **parts: type[BatchRange | Measurement]
) -> st.SearchStrategy[Any]:
    """What the schema of ``model`` allows, with and without each optional one of ``parts``."""
    whole = allowed(model.model_json_schema())
    others = st.fixed_dictionaries({name: st.none() | allowed(of.model_json_schema()) for name, of in parts.items()})
    return st.tuples(whole, others).map(lambda both: {**both[0], **both[1]})


CLAIMS = documents(Ready, batch_range=BatchRange)
PROGRESS = documents(Progress, measurement=Measurement)
SWITCHED = documents(Switched)


def report(sim: SimulatedPool, document: dict[str, Any]) -> None:
    """Let a member of job 1 report what ``document`` says, if the schema allows it."""
    envelope = {"job": "job-1", "host": "host-1", "incarnation": 1, "slot": 0, "time": at(sim.now)}
    worker, generation = sim.members("job-1")[0], sim.records["job-1"].generation
    with suppress(ValidationError):
        sim.handle(Report(**envelope, worker=worker, generation=generation, content=document))


@fuzzed(examples=150)
@given(
    st.sampled_from(list(PolicyName)),
    st.booleans(),
    st.sampled_from(LIMITS),
    st.none() | st.floats(1, 1e6),
    CLAIMS,
    st.lists(PROGRESS | SWITCHED, max_size=6),
)
def test_whatever_a_job_reports_the_scheduler_decides_on(
    policy: PolicyName,
    preemption: bool,
    limits: dict[str, Any],
    deadline: float | None,
    claim: dict[str, Any],
    reports: list[dict[str, Any]],
) -> None:
    try:
        claimed = Ready.model_validate(claim)
    except ValidationError:
        return
    sim = SimulatedPool(policies=POLICIES, chosen=PoolPolicy(policy=policy, preemption=preemption))
    sim.handle(StateRestored())
    for host in ("host-1", "host-2"):
        sim.add_host(host, 4)
    until = None if deadline is None else at(sim.now + deadline)
    common = {"name": "train", "package": "packages/1", "script": "train.py"}
    spec = JobSpec.model_validate({**common, **limits, "deadline": until})
    other = JobSpec.model_validate({**common, "max_workers": 8})
    sim.submit([Claim(0.0, "job-1", spec, LONG, claimed=claimed), Submission(1.0, "job-2", other, LONG)])
    sim.run(until=10)
    for document in reports:
        if sim.members("job-1"):
            report(sim, document)
        sim.now += OBSERVE_SECONDS
        sim.handle(Tick())
        sim.run(until=sim.now - sim.start + 3)
    sim.restart_scheduler()
    sim.send_heartbeats()
    assert sim.scheduler.explain().keys() >= {"job-2"}
