"""What each kind of service may publish and subscribe to: its role, and the permissions for nats-server."""

from dataclasses import dataclass
from typing import Any

from . import subjects
from .credentials import PUBLISHER_COMMANDS
from .subjects import (
    ALLOCATIONS,
    BUCKETS,
    CURVES,
    DEAD_LETTERS,
    EVENTS,
    HOSTS,
    JOB_SLOTS,
    JOB_STREAMS,
    JOBS,
    LEASE,
    LOGS,
    NUMBERS,
    POLICY,
    POOL,
    POOL_SLOTS,
    PROGRESS,
    REPORTS,
    STREAMS,
    TENANTS,
    USAGE,
    WEBHOOKS,
    BucketSpec,
    Stream,
)

_API = "$JS.API"


@dataclass(frozen=True)
class Role:
    """What one kind of service may do; everything else is denied."""

    name: str
    publishes: tuple[str, ...] = ()
    subscribes: tuple[str, ...] = ()
    follows: tuple[Stream, ...] = ()
    reads: tuple[BucketSpec[Any], ...] = ()
    writes: tuple[BucketSpec[Any], ...] = ()
    """Buckets that the service reads and writes."""
    purges: tuple[str, ...] = ()
    """Names of streams from which the service removes messages."""
    creates_streams: bool = False
    """Whether the service creates all streams and buckets that do not exist."""
    writes_dead_letters: bool = True

    @property
    def inbox(self) -> str:
        """Where answers to this role arrive; no other role can subscribe to it."""
        return f"_INBOX_{self.name}"


_COMMANDS = (subjects.JOB_COMMANDS, subjects.HOST_COMMANDS, subjects.POOL_COMMANDS, subjects.TENANT_COMMANDS)

REGISTRY = Role(
    "registry",
    publishes=tuple(f"resile.host.*.{what}" for what in subjects.ANNOUNCEMENTS),
    subscribes=(subjects.HELLOS, subjects.GOODBYES, subjects.HEARTBEATS, subjects.PROBES, subjects.HOST_COMMANDS),
    follows=(EVENTS,),
    writes=(HOSTS, POOL),
    purges=(EVENTS.name,),
    creates_streams=True,
)
SCHEDULER = Role(
    "scheduler",
    publishes=(subjects.JOB_EVENTS, subjects.POOL_EVENTS, subjects.INSTRUCTIONS, subjects.PROBES),
    subscribes=(
        subjects.HOST_EVENTS,
        subjects.HEARTBEATS,
        subjects.REPORTS_OF_ALL,
        subjects.SUSPICIONS,
        subjects.JOB_COMMANDS,
        subjects.POOL_COMMANDS,
        subjects.TENANT_COMMANDS,
        subjects.EXPLAIN_JOBS,
    ),
    follows=(EVENTS, REPORTS),
    reads=(HOSTS, POOL),
    writes=(JOBS, ALLOCATIONS, LEASE, NUMBERS, POLICY, TENANTS, USAGE),
    purges=tuple(stream for stream, _ in JOB_STREAMS),
    creates_streams=True,
)
LEARNER = Role(
    "learner",
    publishes=(
        subjects.HELLOS,
        subjects.GOODBYES,
        subjects.HEARTBEATS,
        subjects.REPORTS_OF_ALL,
        subjects.SUSPICIONS,
        subjects.LOGS_OF_ALL,
    ),
    subscribes=(subjects.INSTRUCTIONS, subjects.CALLS),
    reads=(JOBS, ALLOCATIONS, HOSTS, POOL),
)
MONITOR = Role(
    "monitor",
    publishes=(*_COMMANDS, subjects.EXPLAIN_JOBS, subjects.CALLS),
    subscribes=(
        subjects.HOST_EVENTS,
        subjects.HEARTBEATS,
        subjects.JOB_EVENTS,
        subjects.POOL_EVENTS,
        subjects.REPORTS_OF_ALL,
        subjects.LOGS_OF_ALL,
        subjects.TRACES,
        subjects.DEAD_LETTER,
    ),
    follows=(EVENTS, REPORTS, PROGRESS, LOGS, DEAD_LETTERS),
    reads=(JOBS, HOSTS, POLICY, TENANTS, USAGE, LEASE),
    writes=(CURVES, JOB_SLOTS, POOL_SLOTS, WEBHOOKS),
)
PUBLISHER = Role(
    "publisher",
    publishes=tuple(subjects.command(*name.split(".")) for name in PUBLISHER_COMMANDS),
    subscribes=(subjects.HOST_EVENTS, subjects.JOB_EVENTS, subjects.POOL_EVENTS),
    follows=(EVENTS,),
    writes_dead_letters=False,
)
"""The account for systems outside the pool (docs/events.md): it runs no code and changes no tenant or policy."""
ROLES = {role.name: role for role in (REGISTRY, SCHEDULER, LEARNER, MONITOR, PUBLISHER)}


def permissions(role: Role) -> dict[str, Any]:
    """Return the ``permissions`` block of nats-server for a user of this role."""
    own = (subjects.DEAD_LETTER, subjects.trace(role.name)) if role.writes_dead_letters else ()
    publish = [*role.publishes, *own]
    for stream in role.follows:
        publish += _reading(stream.name)
    for bucket in (*role.reads, *role.writes):
        publish += _reading(bucket.stream)
    publish += [subject for bucket in role.writes for subject in (f"{bucket.prefix}*", bucket.fence)]
    publish += [f"{_API}.STREAM.PURGE.{stream}" for stream in role.purges]
    for name in stream_names() if role.creates_streams else ():
        publish += [f"{_API}.STREAM.CREATE.{name}", f"{_API}.STREAM.UPDATE.{name}", f"{_API}.STREAM.INFO.{name}"]
    return {
        "publish": {"allow": sorted(set(publish))},
        "subscribe": {"allow": [*role.subscribes, f"{role.inbox}.>"]},
        "allow_responses": True,
    }


def stream_names() -> tuple[str, ...]:
    """Return the names of all streams, including those of buckets."""
    return (*(stream.name for stream in STREAMS), *(bucket.stream for bucket in BUCKETS))


def _reading(stream: str) -> list[str]:
    """Return the subjects of requests that read a stream."""
    return [
        f"{_API}.STREAM.INFO.{stream}",
        f"{_API}.STREAM.MSG.GET.{stream}",
        f"{_API}.DIRECT.GET.{stream}",
        f"{_API}.DIRECT.GET.{stream}.>",
        f"{_API}.CONSUMER.CREATE.{stream}.>",
        f"{_API}.CONSUMER.MSG.NEXT.{stream}.*",
        f"$JS.ACK.{stream}.>",
    ]
