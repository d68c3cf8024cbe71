"""Who is here: the decisions, without input or output.

Events go in through `Registry.handle`, commands come out; the service carries them out. The rules:

- A hello with a higher incarnation joins its host; whatever an older incarnation says has no effect. An incarnation
  that is lost or has left stays so: an agent that reads this in its host's record comes back with a higher one.
- A host is lost after ``detection_seconds`` of silence *while the registry was listening*. Listening time passes with
  the ticks and stands still between two ticks that lie far apart, so whatever made a tick late (the registry stood
  still, or its link was down: the service sends a tick only while it has one) extends every deadline by as much.
- A registry that starts anew knows no deadlines. Each host's was at most ``detection_seconds`` after the last moment of
  its earlier life, and so is at most that far off again.
- What was stored just before a registry ended may not have been published: the next one publishes it again, and the
  bus drops what it knows.
- A heartbeat costs the same however many hosts there are: all have the same patience, so the order in which they
  were heard is the order of their deadlines.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from resile_shared.messages.commands import Accepted, HostDrain, Refused
from resile_shared.messages.hosts import (
    HostDraining,
    HostGoodbye,
    HostHello,
    HostJoined,
    HostLeft,
    HostLost,
    HostRecord,
    HostState,
)
from resile_shared.messages.message import at

REMEMBERED_COMMANDS = 1000
ANNOUNCE_AGAIN_SECONDS = 300.0


@dataclass(frozen=True)
class HostsLoaded:
    """What an earlier registry stored. The first event, if there is any."""

    hosts: tuple[HostRecord, ...]


@dataclass(frozen=True)
class HeartbeatReceived:
    """A heartbeat, as far as it matters here."""

    host: str
    incarnation: int


@dataclass(frozen=True)
class DrainRequested:
    """Somebody asks for a drain; ``command`` is the id of the request."""

    command: str
    drain: HostDrain


@dataclass(frozen=True)
class Tick:
    """Time passes, and the link to the bus is up. Due every ``tick_seconds``."""


Event = HostsLoaded | HostHello | HeartbeatReceived | HostGoodbye | DrainRequested | Tick


Announcement = HostJoined | HostDraining | HostLost | HostLeft


@dataclass(frozen=True)
class StoreHost:
    """Store the record; it is the truth, and what is published only makes it known fast."""

    record: HostRecord


@dataclass(frozen=True)
class Publish:
    """Tell everyone."""

    event: Announcement


@dataclass(frozen=True)
class Reply:
    """Answer the request ``command``."""

    command: str
    answer: Accepted | Refused


Command = StoreHost | Publish | Reply


class Registry:
    """The state of all hosts and all decisions about them. What it knows can be read; only `handle` changes it."""

    def __init__(self, *, detection_seconds: float = 3.0, tick_seconds: float = 0.25) -> None:
        self._detection_seconds = detection_seconds
        self._patience = 2 * tick_seconds  # a tick later than this is late
        self._listened = 0.0  # until the last tick
        self._last_tick: float | None = None
        self._heard: dict[str, float] = {}  # host -> listening time of its last word; the longest silent first
        self._answers: dict[str, Accepted | Refused] = {}
        self.hosts: dict[str, HostRecord] = {}

    def handle(self, event: Event, *, now: float) -> list[Command]:
        """Take ``event`` in at ``now`` (seconds since the epoch); return what is to be done about it, in order."""
        match event:
            case HostsLoaded(hosts):
                return self._restore(hosts, now)
            case HostHello():
                return self._hello(event, now)
            case HeartbeatReceived(host, incarnation):
                if self._is_current(host, incarnation):
                    self._hear(host, now)
                return []
            case HostGoodbye(host=host, incarnation=incarnation, reason=reason):
                if not self._is_current(host, incarnation):
                    return []
                return self._gone(host, HostState.LEFT, reason or "said goodbye", now)
            case DrainRequested(command, drain):
                return self._drain(command, drain, now)
            case Tick():
                return self._tick(now)

    # time

    def _clock(self, now: float) -> float:
        """Return the listening time: that of the last tick, and what has passed since, up to a late tick."""
        if self._last_tick is None:
            self._last_tick = now
        return self._listened + min(max(now - self._last_tick, 0.0), self._patience)

    def _tick(self, now: float) -> list[Command]:
        self._listened = self._clock(now)
        self._last_tick = now
        silent = []
        for host, heard in self._heard.items():
            if self._listened - heard <= self._detection_seconds:
                break
            silent.append(host)
        reason = f"silent for {self._detection_seconds:g} seconds"
        return [command for host in silent for command in self._gone(host, HostState.LOST, reason, now)]

    def _hear(self, host: str, now: float) -> None:
        self._heard.pop(host, None)
        self._heard[host] = self._clock(now)

    def _restore(self, hosts: Iterable[HostRecord], now: float) -> list[Command]:
        for record in hosts:
            self.hosts[record.host] = record
            if record.state in (HostState.UP, HostState.DRAINING):
                self._hear(record.host, now)
        recent = at(now - ANNOUNCE_AGAIN_SECONDS)
        return [Publish(_announcement(record)) for record in self.hosts.values() if record.since >= recent]

    # hosts

    def _is_current(self, host: str, incarnation: int) -> bool:
        """Whether this is the incarnation that counts, and it is neither lost nor has it left."""
        return host in self._heard and self.hosts[host].incarnation == incarnation

    def _hello(self, hello: HostHello, now: float) -> list[Command]:
        known = self.hosts.get(hello.host)
        if known and hello.incarnation < known.incarnation:
            return []
        if known and hello.incarnation == known.incarnation:
            return self._hello_again(hello, known, now)
        ended: list[Command] = []
        if hello.host in self._heard:
            ended = self._gone(hello.host, HostState.LOST, "its agent started anew", now)
        record = HostRecord(**hello.model_dump(), state=HostState.UP, since=at(now), reason="said hello")
        return [*ended, *self._change(record, now)]

    def _hello_again(self, hello: HostHello, known: HostRecord, now: float) -> list[Command]:
        if hello.host not in self._heard:
            return []
        record = known.model_copy(update={name: getattr(hello, name) for name in HostHello.model_fields})
        if record == known:
            self._hear(hello.host, now)
            return []
        changed = record.model_copy(update={"since": at(now), "reason": "its slots or labels changed"})
        return self._change(changed, now)

    def _change(self, record: HostRecord, now: float) -> list[Command]:
        """Take in a record of a host that is here."""
        self._hear(record.host, now)
        self.hosts[record.host] = record
        return [StoreHost(record), Publish(_announcement(record))]

    def _gone(self, host: str, state: HostState, reason: str, now: float) -> list[Command]:
        del self._heard[host]
        record = self.hosts[host].model_copy(update={"state": state, "since": at(now), "reason": reason})
        self.hosts[host] = record
        return [StoreHost(record), Publish(_announcement(record))]

    # drain

    def _drain(self, command: str, drain: HostDrain, now: float) -> list[Command]:
        if command in self._answers:
            return [Reply(command, self._answers[command])]
        changes: list[Command] = []
        if drain.host_id in self._heard:
            answer: Accepted | Refused = Accepted()
            changes = self._start_drain(drain, now)
        elif drain.host_id in self.hosts:
            state = self.hosts[drain.host_id].state.value
            answer = Refused(code="conflict", reason=f"host {drain.host_id} is {state} and runs nothing")
        else:
            answer = Refused(code="unknown", reason=f"there is no host {drain.host_id}: `resile hosts` lists them")
        self._answers[command] = answer
        if len(self._answers) > REMEMBERED_COMMANDS:
            del self._answers[next(iter(self._answers))]
        return [*changes, Reply(command, answer)]

    def _start_drain(self, drain: HostDrain, now: float) -> list[Command]:
        deadline = None if drain.deadline_seconds is None else at(now + drain.deadline_seconds)
        known = self.hosts[drain.host_id]
        if known.state is HostState.DRAINING and known.drain_deadline == deadline:
            return []
        record = known.model_copy(
            update={"state": HostState.DRAINING, "since": at(now), "reason": "asked for", "drain_deadline": deadline}
        )
        self.hosts[record.host] = record
        return [StoreHost(record), Publish(_announcement(record))]


def _announcement(record: HostRecord) -> Announcement:
    """Return what is told of a host: always the same for the same record."""
    what: dict[str, Any] = {"host": record.host, "incarnation": record.incarnation}
    what |= {"time": record.since, "reason": record.reason}
    match record.state:
        case HostState.UP:
            return HostJoined(**what, slots=record.slots, labels=record.labels)
        case HostState.DRAINING:
            return HostDraining(**what, deadline=record.drain_deadline)
        case HostState.LOST:
            return HostLost(**what)
        case HostState.LEFT:
            return HostLeft(**what)
