"""A pool in memory: the scheduler's core and the agents' cores of its hosts, joined by a queue instead of the bus.

Events go in through `InMemoryPool.handle`. What the cores send each other is delivered at once and in order; what is
left are the commands of the world around them: records to store, worker processes to start and kill, timers. Pure, so
that `resile run`, tests and simulations use the same assembly.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from resile_learner.agent import events as agent
from resile_learner.agent.core import AgentCore
from resile_scheduler.core import events as scheduler
from resile_scheduler.core.core import Scheduler
from resile_shared.messages import instructions
from resile_shared.messages.allocations import Allocation
from resile_shared.messages.hosts import Heartbeat, HostHello, HostRecord, HostState
from resile_shared.messages.message import at
from resile_shared.messages.reports import Report


@dataclass(frozen=True)
class HostEvent:
    """Something happened on ``host``; of no effect if the host has another ``incarnation`` by now."""

    host: str
    incarnation: int
    event: agent.Event


@dataclass(frozen=True)
class HostFailed:
    """``host`` and all its workers are gone."""

    host: str
    reason: str


Event = HostHello | HostFailed | HostEvent | scheduler.Event
"""Events that a pool handles. A hello adds a host, or changes the slots of one that has the same incarnation."""


@dataclass(frozen=True)
class HostCommand:
    """A command about processes of ``host``, valid as long as the host has this ``incarnation``."""

    host: str
    incarnation: int
    command: agent.HostCommand


@dataclass(frozen=True)
class StartTimer:
    """Hand ``event`` to the pool after ``seconds``."""

    seconds: float
    event: scheduler.Event


Command = scheduler.StoreJob | scheduler.WriteAllocation | scheduler.Reply | Report | HostCommand | StartTimer
"""Commands to carry out; a store precedes what depends on it. A report is for display: it was delivered already."""


class InMemoryPool:
    """One scheduler and any number of hosts, each of which needs an `agent.Tick` about once a second."""

    def __init__(self, core: Scheduler) -> None:
        self._scheduler = core
        self._agents: dict[str, AgentCore] = {}
        self._hellos: dict[str, HostHello] = {}
        self._allocations: dict[str, Allocation] = {}
        self._watched: dict[str, set[str]] = {}
        """The jobs whose allocations each host watches."""
        self._queue: deque[Event] = deque()

    def handle(self, event: Event, *, now: float) -> list[Command]:
        """Handle ``event`` at ``now`` (seconds since the epoch), and all that follows from it; return the commands."""
        self._queue.append(event)
        commands: list[Command] = []
        while self._queue:
            commands += self._handle_next(self._queue.popleft(), now)
        return commands

    def _handle_next(self, event: Event, now: float) -> list[Command]:
        match event:
            case HostHello():
                return self._add_host(event, now)
            case HostFailed(host, reason):
                del self._agents[host]
                self._queue.append(self._host_record(host, HostState.LOST, now, reason))
                return []
            case HostEvent(host, incarnation, what):
                agent_core = self._agents.get(host)
                is_current = agent_core and agent_core.incarnation == incarnation
                commands = agent_core.handle(what, now=now) if agent_core and is_current else []
                return [c for command in commands for c in self._from_agent(host, command, now)]
            case _:
                commands_ = self._scheduler.handle(event, now=now)
                return [c for command in commands_ for c in self._from_scheduler(command)]

    def _add_host(self, hello: HostHello, now: float) -> list[Command]:
        known = self._hellos.get(hello.host)
        self._hellos[hello.host] = hello
        if hello.host in self._agents and known and known.incarnation == hello.incarnation:
            self._queue.append(self._host_record(hello.host, HostState.UP, now))
            return []
        self._agents[hello.host] = AgentCore(hello.host, hello.incarnation)
        self._watched[hello.host] = set()
        self._notify(hello.host, agent.Tick(is_bus_up=True))
        return []

    def _notify(self, host: str, event: agent.Event) -> None:
        """Hand ``event`` to the agent of ``host``, whichever incarnation it is."""
        self._queue.append(HostEvent(host, self._hellos[host].incarnation, event))

    def _host_record(self, host: str, state: HostState, now: float, reason: str = "") -> HostRecord:
        return HostRecord(**self._hellos[host].model_dump(), state=state, since=at(now), reason=reason)

    def _from_agent(self, host: str, command: agent.Command, now: float) -> Sequence[Command]:
        match command:
            case agent.AnnounceHost():
                record = self._host_record(host, HostState.UP, now)
                self._queue.append(record)
                self._notify(host, record)
            case Heartbeat():
                self._queue.append(command)
            case Report():
                self._queue.append(command)
                return [command]
            case agent.WatchAllocation(job):
                self._watched[host].add(job)
                self._notify(host, self._allocations[job])
            case agent.UnwatchAllocation(job):
                self._watched[host].remove(job)
            case agent.EndIncarnation():
                raise AssertionError(f"the agent of {host} was superseded: {command.reason}")
            case _:
                return [HostCommand(host, self._hellos[host].incarnation, command)]
        return []

    def _from_scheduler(self, command: scheduler.Command) -> Sequence[Command]:
        match command:
            case scheduler.WriteAllocation(allocation):
                self._allocations[allocation.job] = allocation
                for host in self._agents:
                    if allocation.job in self._watched[host]:
                        self._notify(host, allocation)
                return [command]
            case scheduler.AssignJobs(host, incarnation, jobs):
                assign = instructions.AssignJobs(epoch=self._scheduler.epoch, incarnation=incarnation, jobs=jobs)
                self._notify(host, assign)
            case scheduler.StopWorkers(job, host, incarnation, workers):
                stop = instructions.StopWorkers(
                    epoch=self._scheduler.epoch, job=job, incarnation=incarnation, workers=workers
                )
                self._notify(host, stop)
            case scheduler.PauseWorkers(job, lineage, hosts):
                pause = instructions.PauseWorkers(epoch=self._scheduler.epoch, job=job, lineage=lineage)
                for host in hosts:
                    self._notify(host, pause)
            case scheduler.ProbeHost(host, incarnation, beat, seconds):
                self._notify(host, instructions.SendHeartbeat(incarnation=incarnation))
                return [StartTimer(seconds, scheduler.ProbeExpired(host, incarnation, beat))]
            case scheduler.StoreJob() | scheduler.Reply():
                return [command]
        return []
