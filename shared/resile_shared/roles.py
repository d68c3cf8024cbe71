"""Who may say and hear what on the bus: one role for each kind of service, and its permissions for nats-server."""

from dataclasses import dataclass
from typing import Any

from . import subjects
from .subjects import (
    ALLOCATIONS,
    BUCKETS,
    DEAD_LETTERS,
    EVENTS,
    HOSTS,
    JOBS,
    LEASE,
    LOGS,
    OUTBOX,
    POOL,
    REPORTS,
    STREAMS,
    Keys,
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
    reads: tuple[Keys[Any], ...] = ()
    writes: tuple[Keys[Any], ...] = ()
    """Buckets that it reads and writes."""
    makes_stores: bool = False
    """Whether it makes all streams and buckets that are missing."""

    @property
    def inbox(self) -> str:
        """Where answers to this role arrive; no other role can listen there."""
        return f"_INBOX_{self.name}"


_COMMANDS = (subjects.JOB_COMMANDS, subjects.HOST_COMMANDS)

REGISTRY = Role(
    "registry",
    publishes=tuple(f"resile.host.*.{what}" for what in subjects.ANNOUNCEMENTS),
    subscribes=(subjects.HELLOS, subjects.GOODBYES, subjects.HEARTBEATS, subjects.HOST_COMMANDS),
    follows=(EVENTS,),
    writes=(HOSTS, POOL),
    makes_stores=True,
)
SCHEDULER = Role(
    "scheduler",
    publishes=(subjects.JOB_EVENTS, subjects.INSTRUCTIONS),
    subscribes=(subjects.HOST_EVENTS, subjects.HEARTBEATS, subjects.REPORTS_OF_ALL, subjects.JOB_COMMANDS),
    follows=(EVENTS, REPORTS),
    reads=(HOSTS, POOL),
    writes=(JOBS, ALLOCATIONS, LEASE, OUTBOX),
    makes_stores=True,
)
LEARNER = Role(
    "learner",
    publishes=(
        subjects.HELLOS,
        subjects.GOODBYES,
        subjects.HEARTBEATS,
        subjects.REPORTS_OF_ALL,
        subjects.LOGS_OF_ALL,
    ),
    subscribes=(subjects.INSTRUCTIONS,),
    reads=(JOBS, ALLOCATIONS, HOSTS, POOL),
)
MONITOR = Role(
    "monitor",
    publishes=_COMMANDS,
    subscribes=(
        subjects.HOST_EVENTS,
        subjects.HEARTBEATS,
        subjects.JOB_EVENTS,
        subjects.REPORTS_OF_ALL,
        subjects.LOGS_OF_ALL,
        subjects.DEAD_LETTER,
    ),
    follows=(EVENTS, REPORTS, LOGS, DEAD_LETTERS),
    reads=(JOBS, HOSTS),
)
PUBLISHER = Role(
    "publisher", publishes=_COMMANDS, subscribes=(subjects.HOST_EVENTS, subjects.JOB_EVENTS), follows=(EVENTS,)
)
ROLES = {role.name: role for role in (REGISTRY, SCHEDULER, LEARNER, MONITOR, PUBLISHER)}


def permissions(role: Role) -> dict[str, Any]:
    """Return the ``permissions`` block of nats-server for a user of this role."""
    publish = [*role.publishes, subjects.DEAD_LETTER]
    for stream in role.follows:
        publish += _reading(stream.name)
    for bucket in (*role.reads, *role.writes):
        publish += _reading(bucket.stream)
    publish += [f"{bucket.prefix}*" for bucket in role.writes]
    for name in stores() if role.makes_stores else ():
        publish += [f"{_API}.STREAM.CREATE.{name}", f"{_API}.STREAM.UPDATE.{name}", f"{_API}.STREAM.INFO.{name}"]
    return {
        "publish": {"allow": sorted(set(publish))},
        "subscribe": {"allow": [*role.subscribes, f"{role.inbox}.>"]},
        "allow_responses": True,
    }


def stores() -> tuple[str, ...]:
    """Return the names of all streams, those behind buckets included."""
    return (*(stream.name for stream in STREAMS), *(bucket.stream for bucket in BUCKETS))


def _reading(stream: str) -> list[str]:
    """Subjects on which a stream is asked for its messages."""
    return [
        f"{_API}.STREAM.INFO.{stream}",
        f"{_API}.STREAM.MSG.GET.{stream}",
        f"{_API}.DIRECT.GET.{stream}",
        f"{_API}.DIRECT.GET.{stream}.>",
        f"{_API}.CONSUMER.CREATE.{stream}.>",
        f"{_API}.CONSUMER.MSG.NEXT.{stream}.*",
        f"$JS.ACK.{stream}.>",
    ]
