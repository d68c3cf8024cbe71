"""Whatever comes over the bus: it is refused when it is decoded, or every core handles it and stays small."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import hypothesis.strategies as st
import orjson
from hypothesis import given
from pydantic import BaseModel

from resile_learner.agent.core import AgentCore
from resile_learner.agent.events import MessageReceived
from resile_learner.agent.events import Tick as AgentTick
from resile_learner.messages import from_worker
from resile_monitor.projection import Projection
from resile_registry.core import HeartbeatReceived, HostChangeRequested, Registry
from resile_registry.core import Tick as RegistryTick
from resile_scheduler.core.core import Scheduler
from resile_scheduler.core.events import JobChangeRequested, JobSubmitted
from resile_scheduler.core.events import Tick as SchedulerTick
from resile_shared.bus.envelope import Malformed, decode, type_of
from resile_shared.messages.allocations import Allocation
from resile_shared.messages.commands import HostDrain, HostUndrain, JobPause, JobPriority, JobResume, JobStop, JobSubmit
from resile_shared.messages.hosts import Heartbeat, HostGoodbye, HostHello, HostRecord
from resile_shared.messages.instructions import Instruction
from resile_shared.messages.jobs import JobRecord
from resile_shared.messages.reports import Report

from .documents import ANYTHING, nearly
from .fuzzing import fuzzed

CHANGES = (JobPriority, JobStop, JobPause, JobResume)
TO_REGISTRY = (HostHello, Heartbeat, HostGoodbye, HostDrain, HostUndrain)
TO_SCHEDULER = (HostRecord, Heartbeat, Report, JobSubmit, *CHANGES)
TO_AGENT = (Allocation, HostRecord, Instruction)
TO_MONITOR = (JobRecord, HostRecord, Heartbeat, Report)
MAX_ENTITIES = 50


def messages(models: Iterable[type[BaseModel]]) -> st.SearchStrategy[list[tuple[type[BaseModel], bytes]]]:
    """Bodies of messages, most of them valid."""
    one = [
        st.tuples(st.just(model), nearly(model.model_json_schema()).map(_encode) | st.binary(max_size=40))
        for model in models
    ]
    return st.lists(st.one_of(one), max_size=30)


def _encode(document: Any) -> bytes:
    try:
        return orjson.dumps(document)
    except (TypeError, ValueError):
        return repr(document).encode(errors="replace")


def decoded(received: list[tuple[type[BaseModel], bytes]]) -> list[Any]:
    """Decode as the bus does; what is malformed is dropped."""
    found = []
    for model, body in received:
        headers = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "s", "ce-type": type_of(model)}
        with suppress(Malformed):
            found.append(decode(model, subject="s", headers=headers, body=body).message)
    return found


@fuzzed(examples=60)
@given(messages(TO_REGISTRY))
def test_the_registry_handles_what_hosts_say(received: list[tuple[type[BaseModel], bytes]]) -> None:
    core = Registry()
    for number, message in enumerate(decoded(received)):
        match message:
            case Heartbeat():
                event: Any = HeartbeatReceived(message.host, message.incarnation)
            case HostDrain() | HostUndrain():
                event = HostChangeRequested(f"command-{number}", message)
            case _:
                event = message
        core.handle(event, now=float(number))
        core.handle(RegistryTick(), now=float(number))
    assert len(core.hosts) <= MAX_ENTITIES


@fuzzed(examples=60)
@given(messages(TO_SCHEDULER))
def test_the_scheduler_handles_what_hosts_and_users_say(received: list[tuple[type[BaseModel], bytes]]) -> None:
    core = Scheduler()
    for number, message in enumerate(decoded(received)):
        match message:
            case JobSubmit(spec=spec):
                event: Any = JobSubmitted(f"command-{number}", spec)
            case JobPriority() | JobStop() | JobPause() | JobResume():
                event = JobChangeRequested(f"command-{number}", message)
            case _:
                event = message
        core.handle(event, now=float(number))
        core.handle(SchedulerTick(), now=number + 0.5)
    assert len(core.explain()) <= MAX_ENTITIES


@fuzzed(examples=60)
@given(messages(TO_AGENT), st.lists(nearly(from_worker.json_schema()), max_size=20))
def test_the_agent_handles_what_the_scheduler_and_workers_say(
    received: list[tuple[type[BaseModel], bytes]], said: list[Any]
) -> None:
    core = AgentCore("host-1", 1)
    for number, message in enumerate(decoded(received)):
        event = message.root if isinstance(message, Instruction) else message
        core.handle(event, now=float(number))
        core.handle(AgentTick(is_bus_up=True), now=float(number))
    for document in said:
        try:
            message = from_worker.validate_json(_encode(document))
        except ValueError:
            continue
        for job, worker in list(core.workers):
            if worker == message.worker:
                core.handle(MessageReceived(job, message), now=100.0)
    assert len(core.workers) <= 30 * MAX_ENTITIES


@fuzzed(examples=60)
@given(messages(TO_MONITOR))
def test_the_projection_shows_what_services_say(received: list[tuple[type[BaseModel], bytes]]) -> None:
    projection = Projection()
    for number, message in enumerate(decoded(received)):
        match message:
            case JobRecord():
                projection.store_job(message.job, message, revision=number)
            case HostRecord():
                projection.store_host(message.host, message, revision=number)
            case Heartbeat():
                projection.beat(message)
            case Report():
                projection.report(message)
    for summary in projection.jobs().jobs:
        record = projection.record(summary.id)
        assert record is not None
        projection.job(record, ()).model_dump_json()
    projection.hosts().model_dump_json()


@fuzzed(examples=100)
@given(ANYTHING, st.sampled_from([*TO_REGISTRY, *TO_SCHEDULER, *TO_AGENT, *TO_MONITOR]))
def test_anything_at_all_is_decoded_or_malformed(document: Any, model: type[BaseModel]) -> None:
    decoded([(model, _encode(document))])
