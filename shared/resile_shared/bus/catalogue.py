"""The model of the messages on each subject. Other subjects are not used."""

from collections.abc import Mapping

from pydantic import BaseModel

from ..messages import commands, hosts
from ..messages.deadletters import DeadLetter
from ..messages.instructions import Instruction
from ..messages.jobs import JobEvent
from ..messages.logs import LogLines
from ..messages.pool import PolicyEvent, TenantEvent
from ..messages.reports import Report
from ..messages.spans import Spans
from .envelope import Malformed
from .subjects import InvalidSubject, parse

COMMANDS: Mapping[str, type[BaseModel]] = {
    "job.submit": commands.JobSubmit,
    "job.priority": commands.JobPriority,
    "job.stop": commands.JobStop,
    "job.pause": commands.JobPause,
    "job.resume": commands.JobResume,
    "job.delete": commands.JobDelete,
    "host.drain": commands.HostDrain,
    "host.undrain": commands.HostUndrain,
    "pool.policy": commands.PoolPolicy,
    "pool.suspend": commands.PoolSuspend,
    "tenant.set": commands.TenantSet,
    "tenant.delete": commands.TenantDelete,
}
QUERIES: Mapping[str, type[BaseModel]] = {"jobs.explain": commands.ExplainJobs}
HOST_EVENTS: Mapping[str, type[BaseModel]] = {
    "hello": hosts.HostHello,
    "goodbye": hosts.HostGoodbye,
    "joined": hosts.HostJoined,
    "draining": hosts.HostDraining,
    "lost": hosts.HostLost,
    "left": hosts.HostLeft,
}
POOL_EVENTS: Mapping[str, type[BaseModel]] = {"policy": PolicyEvent, "tenant": TenantEvent}
OTHERS: Mapping[str, type[BaseModel]] = {
    "heartbeat": hosts.Heartbeat,
    "instruction": Instruction,
    "probe": hosts.ProbeFailed,
    "job": JobEvent,
    "report": Report,
    "suspicion": Report,
    "log": LogLines,
    "trace": Spans,
    "deadletter": DeadLetter,
}


def model_of(subject: str) -> type[BaseModel]:
    """Return the model of the messages on ``subject``. Raises Malformed for an unknown subject."""
    try:
        parsed = parse(subject)
    except InvalidSubject as error:
        raise Malformed(str(error)) from None
    match parsed.family:
        case "host":
            model = HOST_EVENTS.get(parsed.what)
        case "pool":
            model = POOL_EVENTS.get(parsed.id)
        case "command":
            model = COMMANDS.get(f"{parsed.id}.{parsed.what}")
        case "query":
            model = QUERIES.get(f"{parsed.id}.{parsed.what}")
        case family:
            model = OTHERS.get(family)
    if model is None:
        raise Malformed(f"unknown subject {subject}")
    return model
