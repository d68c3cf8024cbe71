"""A made-up day of a busy pool, as the events that are stored of it."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from resile_shared.bus import subjects
from resile_shared.bus.catalogue import model_of
from resile_shared.bus.client import Bus
from resile_shared.bus.envelope import encode, headers_for
from resile_shared.bus.subjects import EVENTS
from resile_shared.messages.hosts import HostJoined, HostLost, HostRecord, HostState, Slot
from resile_shared.messages.jobs import HistoryItem, JobEvent, JobRecord, JobState

from .examples import host, job
from .monitors import Scene

DAY = timedelta(days=1)
SLOTS_PER_HOST = 8
Event = tuple[datetime, str, JobEvent | HostJoined | HostLost]


@dataclass
class Day:
    """Jobs come and go and share the slots of hosts that are lost and come back; ``end`` is its last moment."""

    num_jobs: int
    num_slots: int
    end: datetime
    seed: int = 0
    records: dict[str, JobRecord] = field(default_factory=dict)
    hosts: dict[str, HostRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._weights: dict[str, int] = {}
        self._given: dict[str, int] = {}

    def events(self) -> Iterator[Event]:
        """Yield the events in order; afterwards ``records`` and ``hosts`` hold what is stored in the end."""
        begin = self.end - DAY
        slots = tuple(Slot(index=index) for index in range(SLOTS_PER_HOST))
        for number in range(self.num_slots // SLOTS_PER_HOST):
            name = f"host-{number + 1}"
            self.hosts[name] = host(name, slots=slots, since=begin)
            yield (
                begin,
                subjects.host_event(name, "joined"),
                HostJoined(host=name, incarnation=1, time=begin, slots=slots),
            )
        for at, what, name in sorted(self._plan(begin)):
            yield from self._happens(at, what, name)

    def _plan(self, begin: datetime) -> Iterator[tuple[datetime, str, str]]:
        for number in range(1, self.num_jobs + 1):
            comes = begin + DAY * (0.75 * self._chance.random() ** 2)
            goes = comes + DAY * self._chance.uniform(0.08, 0.9)
            yield comes, "accepted", f"job-{number}"
            if self._chance.random() < 0.3:
                yield comes + (goes - comes) / 2, "priority", f"job-{number}"
            if goes < self.end:
                yield goes, "completed", f"job-{number}"
        for _ in range(3):
            name = f"host-{self._chance.randrange(len(self.hosts)) + 1}"
            lost = begin + DAY * self._chance.random() * 0.9
            yield lost, "lost", name
            yield lost + timedelta(minutes=40), "joined", name

    def _happens(self, at: datetime, what: str, name: str) -> Iterator[Event]:
        if what in ("lost", "joined"):
            state = HostState.LOST if what == "lost" else HostState.UP
            self.hosts[name] = self.hosts[name].model_copy(update={"state": state, "since": at})
            kind = HostLost(host=name, incarnation=1, time=at, reason="silent")
            back = HostJoined(host=name, incarnation=1, time=at, slots=self.hosts[name].slots)
            yield at, subjects.host_event(name, what), kind if what == "lost" else back
        elif what == "accepted":
            self.records[name] = job(name, submitted=at, num_items=0, allocation=None, unpublished=())
            self._weights[name] = self._chance.randint(1, 6)
            yield self._item(at, name, "accepted", 0)
        elif what == "priority":
            self._weights[name] *= 3
            yield self._item(at, name, "priority", self._given.get(name, 0))
        else:
            del self._weights[name]
            self._given.pop(name, None)
            yield self._item(at, name, "completed", 0)
        yield from self._share(at)

    def _share(self, at: datetime) -> Iterator[Event]:
        free = sum(len(each.slots) for each in self.hosts.values() if each.state is HostState.UP)
        total = sum(self._weights.values())
        wanted = {name: free * weight // total for name, weight in self._weights.items()}
        changed = [name for name in wanted if wanted[name] != self._given.get(name, 0)]
        for name in sorted(changed, key=lambda name: wanted[name] - self._given.get(name, 0)):  # first who gives
            at += timedelta(seconds=0.05)
            yield self._item(at, name, "allocation", wanted[name])
        self._given = wanted

    def _item(self, at: datetime, name: str, kind: str, workers: int) -> Event:
        state = JobState(kind) if kind in list(JobState) else JobState.RUNNING
        number = self.records[name].num_items + 1
        item = HistoryItem(number=number, time=at, kind=kind, generation=number, workers=workers, iteration=number)
        spec = self.records[name].spec.model_copy(update={"name": f"train {name.removeprefix('job-')}"})
        changes = {"state": state, "num_items": number, "allocation": item, "spec": spec}
        self.records[name] = self.records[name].model_copy(update=changes)
        event = JobEvent(job=name, name=spec.name, tenant="default", state=state, priority=5000, item=item)
        return at, subjects.job_event(name, kind), event


async def store_day(day: Day, scene: Scene) -> int:
    """Have everything stored; return how many events there are."""
    num = 0
    for _, subject, event in day.events():
        bus: Bus = scene.scheduler if isinstance(event, JobEvent) else scene.registry
        await bus.connection.send(subject, encode(event), headers=headers_for(event, source="test"))
        num += 1
        if bus is scene.registry or num % 100 == 0:
            await bus.connection.flush()
    while await scene.scheduler.read_stream(EVENTS, model_of).last() < num:  # noqa: ASYNC110 - what the server does sets no event
        await asyncio.sleep(0.1)
    for record in day.records.values():
        await scene.store_job(record)
    for each in day.hosts.values():
        await scene.store_host(each)
    return num
