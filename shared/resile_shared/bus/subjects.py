"""Every subject, stream and bucket of the bus.

Subjects are built from ids by functions, which reject ids that would change their structure, and parsed by `parse`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import BaseModel

from ..errors import ResileError
from ..messages.allocations import Allocation
from ..messages.curves import Curves
from ..messages.hosts import HostRecord
from ..messages.jobs import JobNumber, JobRecord
from ..messages.pool import Lease, PolicyRecord, PoolSettings, TenantsRecord
from ..messages.slot_history import JobSlots, PoolSlots
from ..messages.usage import RemovedUsage
from ..messages.webhooks import Webhook

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")

HOST_EVENTS = "resile.host.>"
HELLOS = "resile.host.*.hello"
GOODBYES = "resile.host.*.goodbye"
HEARTBEATS = "resile.heartbeat.*"
INSTRUCTIONS = "resile.instruction.*"
PROBES = "resile.probe.*"
JOB_EVENTS = "resile.job.>"
POOL_EVENTS = "resile.pool.*"
REPORTS_OF_ALL = "resile.report.*.*"
FACTS = ("ready", "switched", "checkpoint", "warned", "completed", "left", "growth_refused", "failed")
"""The kinds of reports that no later report replaces."""
SUSPICIONS = "resile.suspicion.*"
LOGS_OF_ALL = "resile.log.*"
CALLS = "resile.call.*"
TRACES = "resile.trace.*"
COMMAND_PREFIX = "resile.command."
JOB_COMMANDS = "resile.command.job.*"
HOST_COMMANDS = "resile.command.host.*"
POOL_COMMANDS = "resile.command.pool.*"
TENANT_COMMANDS = "resile.command.tenant.*"
EXPLAIN_JOBS = "resile.query.jobs.explain"
DEAD_LETTER = "resile.deadletter"
ANNOUNCEMENTS = ("joined", "draining", "lost", "left")
"""Host events that the registry publishes; the agent publishes ``hello`` and ``goodbye``."""


class InvalidSubject(ResileError):
    """A malformed subject, or an id that cannot be part of one."""

    def __init__(self, text: str, wanted: str) -> None:
        super().__init__(f"{text!r} is not {wanted}")
        self.text = text


@dataclass(frozen=True)
class Subject:
    """A parsed subject: ``resile.<family>.<id>.<what>``; for commands ``id`` is the entity."""

    family: str
    id: str
    what: str = ""


def host_event(host: str, what: str) -> str:
    """``hello`` and ``goodbye`` from an agent; ``joined``, ``draining``, ``lost``, ``left`` from the registry."""
    return _build("host", host, what)


def heartbeat(host: str) -> str:
    """Heartbeats of one host."""
    return _build("heartbeat", host)


def instruction(host: str) -> str:
    """Instructions of the scheduler to the agent of one host."""
    return _build("instruction", host)


def probe(host: str) -> str:
    """Probes of the scheduler that one host did not answer; not stored."""
    return _build("probe", host)


def job_event(job: str, what: str) -> str:
    """An event from a job's history; ``what`` is the item's kind."""
    return _build("job", job, what)


def job_events(job: str) -> str:
    """All events of one job."""
    return _build("job", job) + ".*"


def job_events_of_kind(what: str) -> str:
    """Events of one kind from the history of any job."""
    _build("job", "any", what)
    return f"resile.job.*.{what}"


def pool_event(what: str) -> str:
    """An event of the whole pool: ``policy`` or ``tenant``."""
    return _build("pool", what)


def report(job: str, kind: str) -> str:
    """Reports of one kind from workers of ``job``."""
    return _build("report", job, kind)


def reports_of(job: str) -> str:
    """All reports from workers of one job."""
    return _build("report", job) + ".*"


def reports_of_kind(kind: str) -> str:
    """Reports of one kind from workers of any job."""
    _build("report", "any", kind)
    return f"resile.report.*.{kind}"


def suspicion(job: str) -> str:
    """Suspicions of workers of one job; not stored, since workers repeat them."""
    return _build("suspicion", job)


def host_subjects(host: str) -> str:
    """All that is stored in streams of one host."""
    return _build("host", host) + ".*"


def log(job: str) -> str:
    """Output of a job's workers."""
    return _build("log", job)


def call(job: str) -> str:
    """Requests to the replicas of one service; the bus gives each to one of them."""
    return _build("call", job)


def trace(service: str) -> str:
    """Spans of changes, from one kind of service; not stored."""
    return _build("trace", service)


def command(entity: str, verb: str) -> str:
    """A request: ``command("job", "stop")``."""
    return _build("command", entity, verb)


def parse(subject: str) -> Subject:
    """Parse a subject. Raises InvalidSubject."""
    root, *tokens = subject.split(".")
    well_formed = root == "resile" and 1 <= len(tokens) <= 3 and all(_TOKEN.fullmatch(token) for token in tokens)
    if not well_formed or tokens[0] not in FAMILIES or len(tokens) != FAMILIES[tokens[0]]:
        raise InvalidSubject(subject, "a subject of Resile")
    return Subject(tokens[0], *tokens[1:]) if len(tokens) > 1 else Subject(tokens[0], "")


class Template(NamedTuple):
    """A subject with the name of an id in the place of the id, as in ``resile.report.{job}.ready``."""

    text: str
    ids: dict[str, str]
    """The ids, by their names."""


_ENTITIES = {
    **dict.fromkeys(("job", "report", "suspicion", "log", "call"), "job"),
    **dict.fromkeys(("host", "heartbeat", "instruction", "probe"), "host"),
}
"""What the id in a subject is that of, by the family."""


def template_of(subject: str) -> Template:
    """Return the template of a subject; that of one without ids is the subject itself."""
    root, *tokens = subject.split(".")
    if root.startswith("_INBOX"):  # where one client reads its answers
        return Template("_INBOX", {})
    if root != "resile" or len(tokens) < 2 or tokens[0] not in _ENTITIES:
        return Template(subject, {})
    family, name, *rest = tokens
    return Template(".".join((root, family, f"{{{_ENTITIES[family]}}}", *rest)), {_ENTITIES[family]: name})


FAMILIES = {
    "host": 3,
    "heartbeat": 2,
    "instruction": 2,
    "probe": 2,
    "job": 3,
    "pool": 2,
    "report": 3,
    "suspicion": 2,
    "log": 2,
    "call": 2,
    "trace": 2,
    "command": 3,
    "query": 3,
    "deadletter": 1,
}
"""The first token of each subject, with the number of all that follow ``resile``."""


def _build(*tokens: str) -> str:
    for token in tokens:
        if not _TOKEN.fullmatch(token):
            raise InvalidSubject(token, "an id: use letters, digits, - and _, at most 64")
    return ".".join(("resile", *tokens))


@dataclass(frozen=True)
class Stream:
    """A stored stream of messages. When a limit is reached, the oldest are deleted."""

    name: str
    subjects: tuple[str, ...]
    max_bytes: int
    max_age: timedelta | None = None
    max_per_subject: int = -1
    syncs: bool = True
    """Whether publishers wait for the disk; if not, messages may be lost when the server's machine fails."""


_MiB = 1 << 20
EVENTS = Stream("events", (HOST_EVENTS, JOB_EVENTS, POOL_EVENTS), 4096 * _MiB)
"""The events of hosts, jobs and the pool: this stream holds the histories of jobs."""
REPORTS = Stream("reports", tuple(map(reports_of_kind, FACTS)), 4096 * _MiB, max_per_subject=2000)
"""All reports except progress: there is so much of it that it would displace what the scheduler has not read."""
PROGRESS = Stream("progress", (reports_of_kind("progress"),), 256 * _MiB, max_per_subject=2000, syncs=False)
"""Progress: most of all messages, replaced by newer ones. Waiting for a slow disk would delay all other streams."""
LOGS = Stream("logs", (LOGS_OF_ALL,), 1024 * _MiB, max_per_subject=20_000, syncs=False)
DEAD_LETTERS = Stream("deadletters", (DEAD_LETTER,), 64 * _MiB, timedelta(days=30))
STREAMS = (EVENTS, REPORTS, PROGRESS, LOGS, DEAD_LETTERS)

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class BucketSpec(Generic[M]):
    """A key-value bucket, and the model of its values."""

    name: str
    model: type[M]

    @property
    def stream(self) -> str:
        """Name of its stream."""
        return f"KV_{self.name}"

    @property
    def prefix(self) -> str:
        """Prefix of the subjects of its keys."""
        return f"$KV.{self.name}."

    @property
    def fence(self) -> str:
        """Subject of the epoch of the only writer; of two tokens, so that no watch of all keys shows it."""
        return f"{self.prefix}writer.epoch"

    def subject(self, key: str) -> str:
        """Return the subject of one key. Raises InvalidSubject."""
        if not _TOKEN.fullmatch(key):
            raise InvalidSubject(key, "a key: use letters, digits, - and _, at most 64")
        return self.prefix + key


JOBS = BucketSpec("jobs", JobRecord)
ALLOCATIONS = BucketSpec("allocations", Allocation)
HOSTS = BucketSpec("hosts", HostRecord)
LEASE = BucketSpec("lease", Lease)
POOL = BucketSpec("pool", PoolSettings)
NUMBERS = BucketSpec("numbers", JobNumber)
POLICY = BucketSpec("policy", PolicyRecord)
TENANTS = BucketSpec("tenants", TenantsRecord)
USAGE = BucketSpec("usage", RemovedUsage)
WEBHOOKS = BucketSpec("webhooks", Webhook)
CURVES = BucketSpec("curves", Curves)
JOB_SLOTS = BucketSpec("jobslots", JobSlots)
POOL_SLOTS = BucketSpec("poolslots", PoolSlots)
BUCKETS: tuple[BucketSpec[Any], ...] = (
    JOBS,
    ALLOCATIONS,
    HOSTS,
    LEASE,
    POOL,
    NUMBERS,
    POLICY,
    TENANTS,
    USAGE,
    WEBHOOKS,
    CURVES,
    JOB_SLOTS,
    POOL_SLOTS,
)
JOB_STREAMS: tuple[tuple[str, Callable[[str], str]], ...] = (
    (EVENTS.name, job_events),
    (REPORTS.name, reports_of),
    (PROGRESS.name, reports_of),
    (LOGS.name, log),
    (CURVES.stream, CURVES.subject),
    (JOB_SLOTS.stream, JOB_SLOTS.subject),
)
"""The streams that hold data of jobs; for each, a function that returns the subject of one job's data."""
LEASE_KEY = "scheduler"
POOL_KEY = "settings"
NUMBERS_KEY = "jobs"
POLICY_KEY = "pool"
TENANTS_KEY = "pool"
POOL_SLOTS_KEY = "pool"
