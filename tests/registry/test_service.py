"""The registry as a service, on a real bus, with agents that only act."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import orjson
import pytest

from resile_registry.service import run
from resile_registry.settings import RegistrySettings
from resile_shared.bus import subjects
from resile_shared.bus.catalogue import model_of
from resile_shared.bus.client import Bus
from resile_shared.bus.envelope import Received, headers_for
from resile_shared.bus.subjects import DEAD_LETTERS, EVENTS, HOST_EVENTS, HOSTS
from resile_shared.errors import UsageError
from resile_shared.messages.commands import Accepted, HostDrain, HostUndrain, Refused
from resile_shared.messages.deadletters import DeadLetter
from resile_shared.messages.hosts import HostEvent, HostRecord
from resile_shared.service import ServiceContext
from resile_shared.settings import load
from resile_shared.version import VERSION
from resile_testing.fake_agent import FakeAgent
from resile_testing.fixtures import Pool
from resile_testing.services import as_process, in_process
from resile_testing.spans import KeptSpans
from resile_testing.waiting import until

from ..shared.examples import hello

PATIENT = "4.0"
"""Detection seconds of a registry that stays at work while this process, with its agents, may have to wait."""
DRAIN = subjects.command("host", "drain")
UNDRAIN = subjects.command("host", "undrain")


class House:
    """A pool without a registry: the hosts' records, what was announced, and agents on demand."""

    def __init__(self, pool: Pool, stack: AsyncExitStack, bus: Bus, publisher: Bus) -> None:
        self.pool = pool
        self.bus = bus
        self.publisher = publisher
        self.records: dict[str, HostRecord] = {}
        self.announced: list[tuple[str, str, int]] = []
        self.letters: list[DeadLetter] = []
        self._stack = stack

    def watch(self) -> tuple[asyncio.Task[None], ...]:
        works = (self._records_change(), self._events_come(), self._letters_come())
        return tuple(asyncio.create_task(work) for work in works)

    async def _records_change(self) -> None:
        async for changes in self.bus.bucket(HOSTS).watch():
            self.records |= {change.key: change.value for change in changes if change.value is not None}

    async def _events_come(self) -> None:
        async def note(received: Received[HostEvent]) -> None:
            event = received.message
            if isinstance(event, HostEvent):
                self.announced.append((event.host, subjects.parse(received.subject).what, event.incarnation))

        await self.bus.follow(EVENTS, model_of, note, subjects=(HOST_EVENTS,))

    async def _letters_come(self) -> None:
        async def note(received: Received[DeadLetter]) -> None:
            self.letters.append(received.message)

        await self.bus.follow(DEAD_LETTERS, DeadLetter, note)

    def state(self, host: str = "host-1") -> tuple[str, int]:
        record = self.records.get(host)
        return (record.state.value, record.incarnation) if record else ("unknown", 0)

    async def agent(self, host: str = "host-1", *, incarnation: int = 1, version: str = VERSION) -> FakeAgent:
        bus = await self.pool.bus("learner", service=f"agent of {host}")
        agent = FakeAgent(bus, host, slots=4, incarnation=incarnation, version=version)
        return await self._stack.enter_async_context(agent)


@pytest.fixture
async def house(pool: Pool) -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        await pool.bus("registry")  # makes the stores
        house = House(pool, stack, await pool.bus("monitor"), await pool.bus("monitor", service="requests"))
        for task in house.watch():
            stack.callback(task.cancel)
        yield house


def registry(pool: Pool, **settings: object) -> AbstractAsyncContextManager[ServiceContext[RegistrySettings]]:
    return in_process(pool, "registry", run, RegistrySettings, **{"detection_seconds": 1.5, **settings})


async def test_a_host_that_says_hello_is_stored_and_announced(house: House) -> None:
    async with registry(house.pool):
        await house.agent()
        await until(lambda: house.announced == [("host-1", "joined", 1)])
        assert house.state() == ("up", 1)
        assert len(house.records["host-1"].slots) == 4


async def test_a_host_of_another_version_is_refused_by_name_and_one_that_does_not_name_its_version_is_too(
    house: House,
) -> None:
    async with registry(house.pool):
        await house.agent(version="0.0.1")
        learner, old = await house.pool.bus("learner", service="old"), hello(host="host-2")
        body = orjson.dumps(old.model_dump(mode="json", exclude={"version"}))
        headers = headers_for(old, source="old")
        await learner.connection.send(subjects.host_event("host-2", "hello"), body, headers=headers)
        await until(lambda: house.state("host-1") == house.state("host-2") == ("left", 1))
        assert house.records["host-1"].reason.startswith(f"it runs Resile 0.0.1, but its pool runs Resile {VERSION}:")
        assert house.records["host-2"].reason.startswith("it runs an older version of Resile, but its pool")
        await house.agent(incarnation=2)
        await until(lambda: house.state() == ("up", 2))
    assert house.letters == []


async def test_after_an_upgrade_hosts_of_the_old_version_have_left(house: House) -> None:
    async with registry(house.pool):
        await house.agent()
        await until(lambda: house.state() == ("up", 1))
    hosts = (await house.pool.bus("registry")).bucket(HOSTS)
    entry = await hosts.get("host-1")
    assert entry is not None
    await hosts.update("host-1", entry.value.model_copy(update={"version": "0.0.1"}), revision=entry.revision)
    async with registry(house.pool):
        await until(lambda: house.announced[-1:] == [("host-1", "left", 1)] and house.state() == ("left", 1))
    assert house.records["host-1"].reason.startswith("it runs Resile 0.0.1, but its pool runs")


async def test_a_silent_host_is_lost_and_comes_back_with_a_higher_incarnation(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = KeptSpans(monkeypatch)
    async with registry(house.pool):
        await house.agent("host-2")
        await (await house.agent()).vanish()
        await until(lambda: house.state() == ("lost", 1))
        await house.agent(incarnation=2)
        await until(lambda: house.state() == ("up", 2))
        assert house.state("host-2") == ("up", 1)

        def announced() -> list[tuple[str, int]]:
            return [(what, incarnation) for host, what, incarnation in house.announced if host == "host-1"]

        await until(lambda: announced()[-1:] == [("joined", 2)])
        assert announced() == [("joined", 1), ("lost", 1), ("joined", 2)]
    ((name, kind, reason),) = spans.errors
    assert (name, kind) == ("host lost", "host lost")
    assert reason is not None
    assert reason.startswith("host-1: ")


async def test_a_host_that_says_goodbye_has_left_at_once(house: House) -> None:
    async with registry(house.pool, detection_seconds=600.0):
        agent = await house.agent()
        await until(lambda: house.state() == ("up", 1))
        await agent.goodbye()
        await until(lambda: house.announced[-1:] == [("host-1", "left", 1)])
        assert house.state() == ("left", 1)


async def test_a_drain_is_stored_before_its_answer_and_has_its_effect_once(house: House) -> None:
    async with registry(house.pool):
        await house.agent()
        await until(lambda: house.state() == ("up", 1))
        drain = HostDrain(host_id="host-1", deadline_seconds=60.0)
        assert await house.publisher.ask(DRAIN, drain, message_id="the same") == Accepted()
        entry = await house.bus.bucket(HOSTS).get("host-1")
        assert entry is not None
        assert entry.value.state == "draining"
        assert await house.publisher.ask(DRAIN, drain, message_id="the same") == Accepted()
        answer = await house.publisher.ask(DRAIN, HostDrain(host_id="host-9"))
        assert isinstance(answer, Refused)
        await until(lambda: ("host-1", "draining", 1) in house.announced)
        assert len(house.announced) == 2


async def test_a_drain_and_its_end_outlive_the_registry_and_the_agent(house: House) -> None:
    async with registry(house.pool):
        agent = await house.agent()
        await until(lambda: house.state() == ("up", 1))
        assert await house.publisher.ask(DRAIN, HostDrain(host_id="host-1")) == Accepted()
    await agent.vanish()
    async with registry(house.pool):
        agent = await house.agent(incarnation=2)
        await until(lambda: house.state() == ("draining", 2))
        assert await house.publisher.ask(UNDRAIN, HostUndrain(host_id="host-1")) == Accepted()
        await until(lambda: house.state() == ("up", 2))
    await agent.vanish()
    async with registry(house.pool):
        await house.agent(incarnation=3)
        await until(lambda: house.state() == ("up", 3))


async def test_a_registry_that_is_killed_and_started_again_loses_nobody(house: House) -> None:
    hosts = [await house.agent(f"host-{number}") for number in range(1, 4)]
    for _ in range(2):
        async with as_process(house.pool, "registry", "--detection-seconds", PATIENT) as process:
            await until(lambda: all(house.state(agent.host) == ("up", 1) for agent in hosts))
            process.kill()
    async with registry(house.pool):
        await hosts[2].vanish()
        await until(lambda: ("host-3", "lost", 1) in house.announced)
    assert house.state("host-3") == ("lost", 1)
    assert house.state("host-1") == house.state("host-2") == ("up", 1)
    assert sorted(house.announced) == [
        ("host-1", "joined", 1),
        ("host-2", "joined", 1),
        ("host-3", "joined", 1),
        ("host-3", "lost", 1),
    ]


async def test_what_was_said_while_no_registry_was_there_is_heard(house: House) -> None:
    await house.agent("host-1")
    leaver = await house.agent("host-2")
    async with registry(house.pool):
        await until(lambda: len(house.records) == 2)
    await leaver.goodbye()
    async with registry(house.pool, detection_seconds=600.0):
        await until(lambda: house.state("host-2") == ("left", 1))
    assert house.state("host-1") == ("up", 1)


async def test_an_outage_of_the_bus_loses_nobody(house: House) -> None:
    async with registry(house.pool):
        await house.agent("host-1")
        silent = await house.agent("host-2")
        await until(lambda: len(house.records) == 2)
        await house.pool.kill()
        await asyncio.sleep(2.0)  # longer than a host may be silent
        await house.pool.server.start()
        await silent.vanish()
        await until(lambda: house.state("host-2") == ("lost", 1))
        assert house.state("host-1") == ("up", 1)


async def test_a_bus_that_stands_still_loses_nobody(house: House) -> None:
    async with registry(house.pool):
        await house.agent("host-1")
        silent = await house.agent("host-2")
        await until(lambda: len(house.records) == 2)
        assert house.pool.server.process is not None
        house.pool.server.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(3.0)  # longer than a host may be silent
        house.pool.server.process.send_signal(signal.SIGCONT)
        await silent.vanish()
        await until(lambda: house.state("host-2") == ("lost", 1))
        assert house.state("host-1") == ("up", 1)


async def test_a_registry_that_stood_still_loses_nobody(house: House) -> None:
    async with as_process(house.pool, "registry", "--detection-seconds", PATIENT) as process:
        await house.agent("host-1")
        silent = await house.agent("host-2")
        await until(lambda: len(house.records) == 2)
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1.5 * float(PATIENT))  # longer than a host may be silent
        process.send_signal(signal.SIGCONT)
        await silent.vanish()
        await until(lambda: house.state("host-2") == ("lost", 1))
        assert house.state("host-1") == ("up", 1)


async def test_a_registry_ends_when_another_one_writes_and_the_next_one_reads_anew(house: House) -> None:
    agent = await house.agent()
    hosts = (await house.pool.bus("registry")).bucket(HOSTS)
    async with as_process(house.pool, "registry") as process:
        await until(lambda: house.state() == ("up", 1))
        entry = await hosts.get("host-1")
        assert entry is not None
        await hosts.update("host-1", entry.value, revision=entry.revision)
        await agent.goodbye()
        assert await process.wait() == 1
    async with registry(house.pool):
        await until(lambda: house.state() == ("left", 1))


async def test_garbage_is_answered_or_laid_aside_and_the_service_lives(house: House) -> None:
    learner = await house.pool.bus("learner", service="garbage")
    async with registry(house.pool):
        for verb in ("drain", "unheard-of"):
            reply = await house.publisher.connection.request(subjects.command("host", verb), b"\xff{")
            assert b"malformed" in reply.data
        garbage = {subjects.host_event("host-1", what) for what in ("hello", "goodbye")}
        for subject in garbage | {subjects.heartbeat("host-1")}:
            await learner.connection.send(subject, b"[1, 2", headers={})
        for body in (b"[]", b'{"host": "host-1", "incarnation": "x"}', b'{"host": 7, "incarnation": 1}'):
            headers = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "x", "ce-type": "resile.Heartbeat"}
            await learner.connection.send(subjects.heartbeat("host-2"), body, headers=headers)
        await until(lambda: {letter.subject for letter in house.letters} >= garbage and len(house.letters) >= 8)
        await house.agent()
        await until(lambda: house.state() == ("up", 1))


def test_a_patience_shorter_than_heartbeats_allow_is_refused() -> None:
    with pytest.raises(UsageError, match="--detection-seconds"):
        load(RegistrySettings, program="x", arguments=["--credentials", "c", "--detection-seconds", "0.3"])
