"""The registry crashes before and after each write and message: the outcome is the same each time."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from resile_shared.bus.nats_server import NatsServer
from resile_shared.bus.subjects import HOSTS
from resile_shared.messages.commands import Accepted, HostDrain, HostUndrain
from resile_shared.messages.hosts import HostState
from resile_testing.crash_points import CrashableService, Forker, Outcome, crash_at
from resile_testing.crashable import Point
from resile_testing.fixtures import Pool
from resile_testing.waiting import until

from .test_service import DRAIN, UNDRAIN, House

NUM_SAMPLED = 6
SECONDS = 60.0


async def play(forker: Forker, folder: Path, fatal: Point | None) -> Outcome:
    """Three hosts come; one is drained and undrained, one leaves, one falls silent and returns."""
    async with AsyncExitStack() as stack:
        server = NatsServer(folder / "bus")
        await server.start()
        stack.push_async_callback(server.stop)
        pool = Pool(server, await stack.enter_async_context(AsyncExitStack()))
        flags = ("--credentials", str(server.credentials("registry")), "--log-level", "error")
        service = CrashableService(forker, *flags, fatal=fatal, log=folder / "points")
        await stack.enter_async_context(service.running())
        house = House(pool, stack, await pool.bus("monitor"), await pool.bus("monitor", service="requests"))
        for task in house.watch():
            stack.callback(task.cancel)
        async with asyncio.timeout(SECONDS):
            await act(house)
        result = await look(house)
        return Outcome(result, service.points, len(service.ends))


async def act(house: House) -> None:
    leaving, _, falling = [await house.agent(f"host-{number}") for number in (1, 2, 3)]
    await until(lambda: [house.state(f"host-{number}")[0] for number in (1, 2, 3)] == ["up"] * 3)
    assert await house.publisher.ask(DRAIN, HostDrain(host_id="host-2"), message_id="drain") == Accepted()
    entry = await house.bus.bucket(HOSTS).get("host-2")
    assert entry is not None
    assert entry.value.state is HostState.DRAINING, "it is stored before the answer is sent"
    assert await house.publisher.ask(UNDRAIN, HostUndrain(host_id="host-2"), message_id="undrain") == Accepted()
    await leaving.goodbye()
    await falling.vanish()
    await until(lambda: (house.state("host-1"), house.state("host-3")) == (("left", 1), ("lost", 1)))
    await house.agent("host-3", incarnation=2)
    await until(lambda: house.state("host-3") == ("up", 2))


async def look(house: House) -> object:
    """Return what is stored of each host and what was announced of it, once all of that is on the stream."""
    newest = {record.host: (record.state.value, record.incarnation) for record in house.records.values()}
    kinds = {"up": "joined"}
    announced: dict[str, list[tuple[str, int]]] = {}

    def is_told() -> bool:
        announced.clear()
        for host, what, incarnation in house.announced:
            announced.setdefault(host, []).append((what, incarnation))
        return all(announced.get(h, [()])[-1] == (kinds.get(state, state), n) for h, (state, n) in newest.items())

    await until(is_told)
    return newest, announced


async def test_a_crash_at_some_points_changes_nothing(tmp_path: Path) -> None:
    await crash_at("registry", play, tmp_path, sample=NUM_SAMPLED)


@pytest.mark.nightly
async def test_a_crash_at_any_point_changes_nothing(tmp_path: Path) -> None:
    await crash_at("registry", play, tmp_path)
