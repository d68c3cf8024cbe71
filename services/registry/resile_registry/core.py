"""Host membership: the decisions, without input or output.

Events go in through `Registry.handle`, commands come out; the service carries them out. The rules:

- A hello with a higher incarnation joins its host; messages of an older incarnation have no effect. An incarnation that
  is lost or has left stays so: its agent reads this in the host's record and returns with a higher one.
- A host is lost after ``detection_seconds`` of silence *while the registry was listening*. Listening time advances with
  the ticks and stops between two ticks that are far apart, so whatever delays a tick (the registry was frozen, or NATS
  was disconnected: the service sends ticks only while it is connected) extends every deadline by the same time.
- After a restart the registry knows no deadlines. It gives each host ``detection_seconds`` from its start.
- A drain lasts until it is undone, or until the host leaves. An agent that is killed or restarts does not end it, nor
  does a hello that arrives again. The record names the newest requests, so that none has its effect twice.
- A record stored just before the registry exited may not have been published: the next one publishes it again, and the
  bus drops duplicates.
- A host of another version of Resile counts as left: one that is present when a registry starts, and one that says
  hello, for which this is stored once. It never replaces a host of its name that is present.
- A host that was lost or has left is forgotten after ``keep_days``.
- A heartbeat takes constant time for any number of hosts: all have the same timeout, so the order of their last
  heartbeats is the order of their deadlines.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from resile_shared.messages.commands import Accepted, HostDrain, HostUndrain, Refused
from resile_shared.messages.hosts import (
    MAX_HOST_COMMANDS,
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
from resile_shared.messages.pool import DEFAULT_KEEP_DAYS
from resile_shared.recent_events import RecentEvents
from resile_shared.version import VERSION, describe_mismatch

REMEMBERED_COMMANDS = 1000
ANNOUNCE_AGAIN_SECONDS = 300.0
DAY_SECONDS = 86400.0


@dataclass(frozen=True)
class HostsLoaded:
    """The records that earlier registries stored. The first event, if there is any."""

    hosts: tuple[HostRecord, ...]


@dataclass(frozen=True)
class HeartbeatReceived:
    """A host sent a heartbeat."""

    host: str
    incarnation: int


@dataclass(frozen=True)
class HostChangeRequested:
    """A client requests a drain, or its end; ``command`` is the id of the request."""

    command: str
    request: HostDrain | HostUndrain


@dataclass(frozen=True)
class Tick:
    """Time passes while NATS is connected. Due every ``tick_seconds``."""


Event = HostsLoaded | HostHello | HeartbeatReceived | HostGoodbye | HostChangeRequested | Tick
Announcement = HostJoined | HostDraining | HostLost | HostLeft


@dataclass(frozen=True)
class StoreHost:
    """Store the record; the published event only announces it."""

    record: HostRecord


@dataclass(frozen=True)
class RemoveHost:
    """Remove all that is stored of a host."""

    host: str


@dataclass(frozen=True)
class Publish:
    """Publish the event."""

    event: Announcement


@dataclass(frozen=True)
class Reply:
    """Answer the request ``command``."""

    command: str
    answer: Accepted | Refused


Command = StoreHost | RemoveHost | Publish | Reply


class Registry:
    """The state of all hosts and all decisions about them. Only `handle` changes it."""

    def __init__(
        self, *, detection_seconds: float = 3.0, keep_days: float = DEFAULT_KEEP_DAYS, tick_seconds: float = 0.25
    ) -> None:
        self._detection_seconds = detection_seconds
        self._keep_seconds = keep_days * DAY_SECONDS
        self._max_tick_gap = 2 * tick_seconds  # a later tick does not count as listening
        self._listening_time = 0.0  # until the last tick
        self._last_tick: float | None = None
        self._last_heard: dict[str, float] = {}  # host -> listening time of its last message; the oldest first
        self._answers: dict[str, Accepted | Refused] = {}
        self.hosts: dict[str, HostRecord] = {}
        self._recent = RecentEvents("registry")

    def handle(self, event: Event, *, now: float) -> list[Command]:
        """Handle ``event`` at ``now`` (seconds since the epoch); return the commands to carry out, in order."""
        with self._recent.handling(event):
            return self._handle(event, now)

    def _handle(self, event: Event, now: float) -> list[Command]:
        match event:
            case HostsLoaded(hosts):
                return self._restore(hosts, now)
            case HostHello():
                return self._hello(event, now)
            case HeartbeatReceived(host, incarnation):
                if self._is_current(host, incarnation):
                    self._record_message(host, now)
                return []
            case HostGoodbye(host=host, incarnation=incarnation, reason=reason):
                if not self._is_current(host, incarnation):
                    return []
                return self._gone(host, HostState.LEFT, reason or "said goodbye", now)
            case HostChangeRequested(command, request):
                return self._change_once(command, request, now)
            case Tick():
                return self._tick(now)

    # time

    def _clock(self, now: float) -> float:
        """Return the listening time: that of the last tick, and the time since, at most the largest tick gap."""
        if self._last_tick is None:
            self._last_tick = now
        return self._listening_time + min(max(now - self._last_tick, 0.0), self._max_tick_gap)

    def _tick(self, now: float) -> list[Command]:
        self._listening_time = self._clock(now)
        self._last_tick = now
        silent = []
        for host, heard in self._last_heard.items():
            if self._listening_time - heard <= self._detection_seconds:
                break
            silent.append(host)
        reason = f"silent for {self._detection_seconds:g} seconds"
        lost = [command for host in silent for command in self._gone(host, HostState.LOST, reason, now)]
        return [*lost, *self._remove_old(now)]

    def _remove_old(self, now: float) -> list[Command]:
        """Forget the hosts that were lost or have left long ago; one that comes back is a new host."""
        oldest = at(max(0.0, now - self._keep_seconds))
        gone = [name for name in self.hosts.keys() - self._last_heard.keys() if self.hosts[name].since < oldest]
        for name in gone:
            del self.hosts[name]
        return [RemoveHost(name) for name in sorted(gone)]

    def _record_message(self, host: str, now: float) -> None:
        self._last_heard.pop(host, None)
        self._last_heard[host] = self._clock(now)

    def _restore(self, hosts: Iterable[HostRecord], now: float) -> list[Command]:
        for record in hosts:
            self.hosts[record.host] = record
            self._answers.update(dict.fromkeys(record.applied_commands, Accepted()))
            if record.state in (HostState.UP, HostState.DRAINING):
                self._record_message(record.host, now)
        recent = at(now - ANNOUNCE_AGAIN_SECONDS)
        stored = [Publish(_announcement(record)) for record in self.hosts.values() if record.since >= recent]
        others = [host for host in self._last_heard if self.hosts[host].version != VERSION]
        return [*stored, *(command for host in others for command in self._gone_as_other(host, now))]

    # hosts

    def _is_current(self, host: str, incarnation: int) -> bool:
        """Whether this is the newest incarnation, and it is neither lost nor has left."""
        return host in self._last_heard and self.hosts[host].incarnation == incarnation

    def _hello(self, hello: HostHello, now: float) -> list[Command]:
        known = self.hosts.get(hello.host)
        if known and hello.incarnation < known.incarnation:
            return []
        if known and hello.incarnation == known.incarnation:
            return self._hello_again(hello, known, now)
        if hello.version != VERSION:
            return self._refuse(hello, now)
        lost: list[Command] = []
        if hello.host in self._last_heard:
            lost = self._gone(hello.host, HostState.LOST, "its agent restarted", now)
        return [*lost, *self._change(self._registered(hello, now), now)]

    def _registered(self, hello: HostHello, now: float) -> HostRecord:
        """Return the record of a new incarnation; a drain of the one before goes on."""
        record = HostRecord(**hello.model_dump(), state=HostState.UP, since=at(now), reason="registered")
        known = self.hosts.get(hello.host)
        if known is None:
            return record
        change: dict[str, Any] = {"applied_commands": known.applied_commands}
        if known.is_drained:
            change |= {"is_drained": True, "drain_deadline": known.drain_deadline}
            change |= {"state": HostState.DRAINING, "reason": "registered, still drained"}
        return record.model_copy(update=change)

    def _refuse(self, hello: HostHello, now: float) -> list[Command]:
        """Store why a host of another version does not join: only once, however often its agent restarts."""
        known, reason = self.hosts.get(hello.host), describe_mismatch("it", hello.version)
        if known and (hello.host in self._last_heard or known.reason == reason):
            return []
        return self._store(HostRecord(**hello.model_dump(), state=HostState.LEFT, since=at(now), reason=reason))

    def _gone_as_other(self, host: str, now: float) -> list[Command]:
        return self._gone(host, HostState.LEFT, describe_mismatch("it", self.hosts[host].version), now)

    def _hello_again(self, hello: HostHello, known: HostRecord, now: float) -> list[Command]:
        if hello.host not in self._last_heard:
            return []
        record = known.model_copy(update={name: getattr(hello, name) for name in HostHello.model_fields})
        if record == known:
            self._record_message(hello.host, now)
            return []
        changed = record.model_copy(update={"since": at(now), "reason": "its slots or labels changed"})
        return self._change(changed, now)

    def _change(self, record: HostRecord, now: float) -> list[Command]:
        """Store and announce the record of a present host."""
        self._record_message(record.host, now)
        return self._store(record)

    def _gone(self, host: str, state: HostState, reason: str, now: float) -> list[Command]:
        del self._last_heard[host]
        change: dict[str, Any] = {"state": state, "since": at(now), "reason": reason}
        if state is HostState.LEFT:
            change |= _UNDRAINED
        return self._store(self.hosts[host].model_copy(update=change))

    def _store(self, record: HostRecord) -> list[Command]:
        self.hosts[record.host] = record
        return [StoreHost(record), Publish(_announcement(record))]

    # drain

    def _change_once(self, command: str, request: HostDrain | HostUndrain, now: float) -> list[Command]:
        """Carry out a request, unless it was; answer it every time."""
        if command in self._answers:
            return [Reply(command, self._answers[command])]
        answer, changes = self._answer(command, request, now)
        self._answers[command] = answer
        if len(self._answers) > REMEMBERED_COMMANDS:
            del self._answers[next(iter(self._answers))]
        return [*changes, Reply(command, answer)]

    def _answer(
        self, command: str, request: HostDrain | HostUndrain, now: float
    ) -> tuple[Accepted | Refused, list[Command]]:
        host = request.host_id
        known = self.hosts.get(host)
        if known is None:
            return Refused(code="unknown", reason=f"there is no host {host}: `resile hosts` lists them"), []
        if host not in self._last_heard and (isinstance(request, HostDrain) or not known.is_drained):
            verb = "drain" if isinstance(request, HostDrain) else "undrain"
            reason = f"host {host} is {known.state.value} and runs no workers: there is nothing to {verb}"
            return Refused(code="conflict", reason=reason), []
        change = _drained(request, now) if isinstance(request, HostDrain) else _UNDRAINED
        is_new = any(getattr(known, name) != value for name, value in change.items())
        applied = (*known.applied_commands, command)[-MAX_HOST_COMMANDS:]
        record = known.model_copy(update={**change, "applied_commands": applied})
        if not is_new or host not in self._last_heard:
            self.hosts[host] = record
            return Accepted(), [StoreHost(record)]
        state = HostState.DRAINING if record.is_drained else HostState.UP
        reason = "drain requested" if record.is_drained else "no longer drained"
        return Accepted(), self._store(record.model_copy(update={"state": state, "since": at(now), "reason": reason}))


_UNDRAINED: Mapping[str, Any] = {"is_drained": False, "drain_deadline": None}


def _drained(drain: HostDrain, now: float) -> Mapping[str, Any]:
    deadline = None if drain.deadline_seconds is None else at(now + drain.deadline_seconds)
    return {"is_drained": True, "drain_deadline": deadline}


def _announcement(record: HostRecord) -> Announcement:
    """Return the event that announces a record: always the same for the same record."""
    fields: dict[str, Any] = {"host": record.host, "incarnation": record.incarnation}
    fields |= {"time": record.since, "reason": record.reason}
    match record.state:
        case HostState.UP:
            return HostJoined(**fields, slots=record.slots, labels=record.labels)
        case HostState.DRAINING:
            return HostDraining(**fields, slots=record.slots, labels=record.labels, deadline=record.drain_deadline)
        case HostState.LOST:
            return HostLost(**fields)
        case HostState.LEFT:
            return HostLeft(**fields)
