"""Contenders for the lease, in virtual time: they stand still, die and come back, and the bus is slow and goes away."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from resile_scheduler.lease import LeadershipLost, Lease
from resile_shared.bus.buckets import Bucket, ConflictError, Entry
from resile_shared.bus.subjects import LEASE_KEY
from resile_shared.messages.pool import Lease as Record

SECONDS = 2.0
CONTENDERS = st.sampled_from(["a", "b", "c"])
T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next thing that is due."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        loop = cast("asyncio.BaseEventLoop", self)
        if not loop._ready and loop._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, loop._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class Store:
    """The key of the lease, with compare-and-set."""

    def __init__(self) -> None:
        self.record: Record | None = None
        self.revision = 0
        self.latency = 0.01
        self.is_up = asyncio.Event()
        self.is_up.set()

    def write(self, record: Record, revision: int) -> int:
        if revision != self.revision:
            raise ConflictError("lease", LEASE_KEY, revision)
        self.record = record
        self.revision += 1
        return self.revision


class Link:
    """The bucket as one contender reaches it: the way there and back takes time, and a pause of it holds it up."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.runs = asyncio.Event()
        self.runs.set()

    async def get(self, _: str) -> Entry[Record] | None:
        record, revision = await self._over(lambda: (self._store.record, self._store.revision))
        return Entry(LEASE_KEY, record, revision) if record else None

    async def create(self, _: str, record: Record) -> int:
        return await self._over(lambda: self._store.write(record, 0))

    async def update(self, _: str, record: Record, *, revision: int) -> int:
        return await self._over(lambda: self._store.write(record, revision))

    async def _over(self, deed: Callable[[], T]) -> T:
        await self.runs.wait()
        await asyncio.sleep(self._store.latency)
        await self._store.is_up.wait()
        done = deed()
        await asyncio.sleep(self._store.latency)
        await self.runs.wait()
        return done


class Contender:
    """One scheduler, which begins again whenever it is deposed."""

    def __init__(self, name: str, store: Store, certain: Callable[["Contender"], None]) -> None:
        self.name = name
        self.link = Link(store)
        self.epoch = 0
        """Of the lease that it has; 0: none."""
        self._certain = certain
        self._num = 0
        self._clock = asyncio.get_running_loop().time
        self._life = asyncio.create_task(self._live())

    async def kill(self) -> None:
        self._life.cancel()
        await asyncio.wait({self._life})
        self.epoch = 0

    async def _live(self) -> None:
        while True:
            self._num += 1
            bucket = cast("Bucket[Record]", self.link)
            lease = Lease(bucket, holder=f"{self.name}-{self._num}", seconds=SECONDS, clock=self._clock)
            await lease.acquire()
            self.epoch = lease.epoch
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(lease.keep())
                    group.create_task(self._act(lease))
            except* LeadershipLost:
                self.epoch = 0

    async def _act(self, lease: Lease) -> None:
        while True:
            await lease.confirm()
            if self.link.runs.is_set():  # it stands still between the look and the deed: compare-and-set is for that
                self._certain(self)
            await asyncio.sleep(0.05)


class Contention(RuleBasedStateMachine):
    """A scheduler that is certain of its lease has the newest epoch, and in the end there is a leader."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.run(asyncio.sleep(0))
        self.store = Store()
        self.contenders: dict[str, Contender] = {}
        self.holders: dict[int, str] = {}
        for name in ("a", "b"):
            self.starts(name)

    def run(self, work: Awaitable[T]) -> T:
        return self.loop.run_until_complete(work)

    def certain(self, contender: Contender) -> None:
        record = self.store.record
        assert record is not None
        assert record.epoch == contender.epoch, f"{contender.name} of {contender.epoch} acts in epoch {record.epoch}"
        assert self.holders.setdefault(contender.epoch, record.holder) == record.holder, "an epoch has one holder"

    def starts(self, name: str) -> None:
        async def start() -> Contender:
            return Contender(name, self.store, self.check)

        self.contenders[name] = self.run(start())
        self.faults: list[AssertionError] = []

    def check(self, contender: Contender) -> None:
        try:
            self.certain(contender)
        except AssertionError as fault:
            self.faults.append(fault)

    @rule(name=CONTENDERS)
    def stands_still(self, name: str) -> None:
        if name in self.contenders:
            self.contenders[name].link.runs.clear()

    @rule(name=CONTENDERS)
    def goes_on(self, name: str) -> None:
        if name in self.contenders:
            self.contenders[name].link.runs.set()

    @rule(name=CONTENDERS)
    def is_killed(self, name: str) -> None:
        if name in self.contenders:
            self.run(self.contenders.pop(name).kill())

    @rule(name=CONTENDERS)
    def is_started(self, name: str) -> None:
        if name not in self.contenders:
            self.starts(name)

    @rule()
    def the_bus_goes(self) -> None:
        self.store.is_up.clear()

    @rule()
    def the_bus_comes(self) -> None:
        self.store.is_up.set()

    @rule(latency=st.floats(0.0, 1.5))
    def the_bus_is_slow(self, latency: float) -> None:
        self.store.latency = latency

    @rule(seconds=st.floats(0.01, 6.0))
    def time_passes(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @invariant()
    def who_is_certain_leads(self) -> None:
        assert not self.faults, self.faults[0]

    def teardown(self) -> None:
        self.store.is_up.set()
        self.store.latency = 0.01
        for contender in self.contenders.values():
            contender.link.runs.set()
        if not self.contenders:
            self.starts("a")
        self.run(asyncio.sleep(5 * SECONDS))
        newest = self.store.record.epoch if self.store.record else 0
        leading = [contender for contender in self.contenders.values() if contender.epoch == newest]
        for contender in self.contenders.values():
            self.run(contender.kill())
        self.loop.close()
        assert len(leading) == 1, "somebody leads as soon as all is well"


Contention.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestContention = Contention.TestCase


def test_a_lease_is_renewed_four_times_in_the_time_for_which_it_is_trusted() -> None:
    """Not more often: each renewal is a write that the bus makes durable."""
    loop, store = VirtualLoop(), Store()
    store.latency = 0.0

    async def lead() -> int:
        contenders = [Contender(name, store, lambda _: None) for name in ("a", "b")]
        await asyncio.sleep(10 * SECONDS)
        for contender in contenders:
            await contender.kill()
        return store.revision

    assert loop.run_until_complete(lead()) in (40, 41)
    loop.close()
