"""Facts reach the bus in their order and once, whatever becomes of the agent."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from resile_learner.agent import reporting
from resile_learner.agent.reporting import MAX_WAITING, ReportQueue, Spool
from resile_shared.bus.client import Bus
from resile_shared.bus.connection import BusClosed
from resile_shared.bus.envelope import Received
from resile_shared.bus.subjects import EVENTS, PROGRESS, REPORTS, host_event
from resile_shared.errors import ResileError
from resile_shared.messages.hosts import HostHello, Slot
from resile_shared.messages.message import at
from resile_shared.messages.reports import CheckpointSaved, Progress, Report, Warned
from resile_shared.version import VERSION
from resile_testing.fixtures import Pool
from resile_testing.waiting import until


def report(content: CheckpointSaved | Progress | Warned) -> Report:
    return Report(
        job="job-1", host="host-1", incarnation=1, worker=0, slot=0, generation=1, time=at(1.0), content=content
    )


def checkpoint(iteration: int) -> Report:
    return report(CheckpointSaved(lineage=1, iteration=iteration, num_bytes=1))


class Reader:
    """What the bus has."""

    def __init__(self, bus: Bus) -> None:
        self.seen: list[tuple[str, int]] = []
        self.warnings: list[str] = []
        self.task = asyncio.create_task(self._read(bus))

    async def _read(self, bus: Bus) -> None:
        """Read progress and facts as they were stored."""
        await asyncio.gather(*(bus.follow(stream, Report, self._note) for stream in (REPORTS, PROGRESS)))

    async def _note(self, received: Received[Report]) -> None:
        content = received.message.content
        self.seen.append((content.kind, getattr(content, "iteration", 0)))
        if isinstance(content, Warned):
            self.warnings.append(content.message)


async def test_what_an_agent_could_not_tell_the_next_one_tells_first_and_once(pool: Pool, tmp_path: Path) -> None:
    await pool.bus("scheduler")
    bus = await pool.bus("learner")
    reader = Reader(await pool.bus("monitor"))
    spool = tmp_path / "facts"
    first = ReportQueue(bus, Spool(spool))
    first.put(checkpoint(1))
    await first.flush()
    assert not spool.exists(), "nothing is kept of what is published"
    first.put(checkpoint(2))
    first.put(report(Progress(iteration=3, epoch=0)))
    first.put(checkpoint(4))
    kept = spool.read_bytes()
    await first.flush()  # all of it arrives, and its agent dies before it could note that
    spool.write_bytes(kept + b'{"id": "cut sho')

    second = ReportQueue(bus, Spool(spool))
    assert second.num_facts == 2, "progress is no fact"
    second.put(checkpoint(5))
    await second.flush()
    await until(lambda: len(reader.seen) >= 5)
    assert [iteration for kind, iteration in reader.seen if kind == "checkpoint"] == [1, 2, 4, 5]
    assert ("progress", 3) in reader.seen
    assert not spool.exists()
    reader.task.cancel()


async def test_messages_are_published_as_they_come(pool: Pool, tmp_path: Path) -> None:
    await pool.bus("scheduler")
    reader = Reader(await pool.bus("monitor"))
    queue = ReportQueue(await pool.bus("learner"), Spool(tmp_path / "facts"))
    publishing = asyncio.create_task(queue.publish())
    for iteration in (1, 2, 3):
        queue.put(checkpoint(iteration))
        await until(lambda iteration=iteration: ("checkpoint", iteration) in reader.seen)
    assert not publishing.done()
    publishing.cancel()
    reader.task.cancel()


async def test_of_progress_that_waits_only_the_newest_between_two_facts_is_published(
    pool: Pool, tmp_path: Path
) -> None:
    """The end of an epoch is a fact; and progress before a fact tells when that happened."""
    await pool.bus("scheduler")
    bus = await pool.bus("learner")
    reader = Reader(await pool.bus("monitor"))
    queue = ReportQueue(bus, Spool(tmp_path / "facts"))
    for iteration in (1, 2):
        queue.put(report(Progress(iteration=iteration, epoch=0)))
    queue.put(checkpoint(3))
    for iteration in (4, 5):
        queue.put(report(Progress(iteration=iteration, epoch=0)))
    queue.put(report(Progress(iteration=6, epoch=0, ends_epoch=True)))
    queue.put(report(Progress(iteration=7, epoch=1)))
    queue.put(report(Progress(iteration=8, epoch=1)).model_copy(update={"job": "job-2"}))
    assert queue.num_facts == 2
    await queue.flush()
    await until(lambda: len(reader.seen) >= 5)
    assert sorted(iteration for _, iteration in reader.seen) == [2, 3, 6, 7, 8]
    reader.task.cancel()


async def test_a_host_is_announced_once_while_the_bus_is_away_and_is_no_fact(pool: Pool, tmp_path: Path) -> None:
    await pool.bus("scheduler")
    bus = await pool.bus("learner")
    spool = tmp_path / "facts"
    queue = ReportQueue(bus, Spool(spool))
    hello = HostHello(
        host="host-1", incarnation=1, address="127.0.0.1", slots=(Slot(index=0),), device_class="cpu", version=VERSION
    )
    for _ in range(3):
        queue.put(hello)
    assert queue.num_facts == 0
    assert not spool.exists()
    await queue.flush()
    subject = host_event("host-1", "hello")
    monitor = await pool.bus("monitor")
    received: list[HostHello] = []
    async with aclosing(monitor.read_stream(EVENTS, HostHello, subject=subject).follow(after=0)) as announced:
        received.append((await anext(announced)).message)
        queue.put(hello.model_copy(update={"incarnation": 2}))
        await queue.flush()
        received.append((await anext(announced)).message)
    assert [each.incarnation for each in received] == [1, 2], "each once"


async def test_nothing_is_remembered_of_what_is_published(pool: Pool, tmp_path: Path) -> None:
    """Thousands of jobs come and go; and what a worker says again later is another report."""
    await pool.bus("scheduler")
    reader = Reader(await pool.bus("monitor"))
    queue = ReportQueue(await pool.bus("learner"), Spool(tmp_path / "facts"))
    for _ in range(2):
        for content in (Warned(message="slow"), Progress(iteration=1, epoch=0)):
            queue.put(report(content))
        queue.put(checkpoint(2))
        await queue.flush()
        assert not any(vars(queue._waiting).values())
    await until(lambda: len(reader.seen) >= 6)
    assert reader.warnings == ["slow", "slow"]
    reader.task.cancel()


async def test_what_a_closed_bus_did_not_take_waits_for_the_next_agent(pool: Pool, tmp_path: Path) -> None:
    await pool.bus("scheduler")
    bus = await pool.bus("learner")
    spool = tmp_path / "facts"
    queue = ReportQueue(bus, Spool(spool))
    queue.put(checkpoint(1))
    await bus.close()
    with pytest.raises(BusClosed):
        await queue.flush()
    assert queue.num_facts == 1
    assert ReportQueue(bus, Spool(spool)).num_facts == 1


async def test_what_is_on_its_way_is_kept_until_it_is_published(pool: Pool, tmp_path: Path) -> None:
    """The agent may end meanwhile, with the machine's power or by a signal; and a scheduler waits for what it has."""
    await pool.bus("scheduler")
    bus = await pool.bus("learner")
    reader = Reader(await pool.bus("monitor"))
    spool = tmp_path / "facts"
    queue = ReportQueue(bus, Spool(spool))
    queue.put(checkpoint(1))
    await pool.kill()
    sending = asyncio.create_task(queue.flush())
    await until(lambda: not bus.is_up)
    await asyncio.sleep(0)  # it has begun
    assert queue.num_facts == 1
    assert ReportQueue(bus, Spool(spool)).num_facts == 1
    sending.cancel()
    await asyncio.wait({sending})
    await pool.server.start()
    await queue.flush()
    await until(lambda: reader.seen == [("checkpoint", 1)])
    reader.task.cancel()


async def test_what_a_worker_repeats_waits_once(pool: Pool, tmp_path: Path) -> None:
    await pool.bus("scheduler")
    queue = ReportQueue(await pool.bus("learner"), Spool(tmp_path / "reports"))
    paused = report(CheckpointSaved(lineage=1, iteration=9, num_bytes=1, pausing=True))
    warned = report(Warned(message="the job is waiting for its checkpoint"))
    for _ in range(100):
        queue.put(paused)
        queue.put(warned)
    assert queue.num_facts == 2
    assert len((tmp_path / "reports").read_bytes().splitlines()) == 2


async def test_of_one_kind_of_a_worker_only_the_newest_wait_and_how_many_were_dropped_is_reported(
    pool: Pool, tmp_path: Path
) -> None:
    await pool.bus("scheduler")
    bus = await pool.bus("learner")
    reader = Reader(await pool.bus("monitor"))
    spool = tmp_path / "facts"
    queue = ReportQueue(bus, Spool(spool))
    queue.put(report(Warned(message="the other kind is not dropped")))
    for iteration in range(5 * MAX_WAITING):
        queue.put(checkpoint(iteration))
        queue.put(report(Progress(iteration=iteration, epoch=iteration, ends_epoch=True)))
        assert queue.num_facts <= 2 * MAX_WAITING + 1
        assert len(spool.read_bytes().splitlines()) <= 2 * queue.num_facts + MAX_WAITING + 1
    assert ReportQueue(bus, Spool(spool)).num_facts == 2 * MAX_WAITING + 1, "the next agent has the same"

    await queue.flush()
    assert queue.num_facts == 0
    assert not spool.exists()
    await until(lambda: len(reader.seen) == 2 * MAX_WAITING + 3)
    newest = list(range(4 * MAX_WAITING, 5 * MAX_WAITING))
    for kind in ("checkpoint", "progress"):
        assert [iteration for seen, iteration in reader.seen if seen == kind] == newest
    dropped = f"{4 * MAX_WAITING} reports ({{}}) of worker 0 were dropped: more than {MAX_WAITING} were waiting"
    assert sorted(reader.warnings) == [
        dropped.format("checkpoint"),
        dropped.format("progress"),
        "the other kind is not dropped",
    ]
    reader.task.cancel()


async def test_only_facts_survive_the_agent(pool: Pool, tmp_path: Path) -> None:
    await pool.bus("scheduler")
    spool = tmp_path / "facts"
    queue = ReportQueue(await pool.bus("learner"), Spool(spool))
    queue.put(report(Progress(iteration=0, epoch=0)))
    for iteration in range(3 * MAX_WAITING):
        queue.put(checkpoint(iteration))
    assert {left.report.content.kind for left in Spool(spool).read()} == {"checkpoint"}


async def test_what_a_full_disk_does_not_let_shorten_stays_whole(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pool.bus("scheduler")
    bus = await pool.bus("learner")
    spool = tmp_path / "facts"
    queue = ReportQueue(bus, Spool(spool))

    def write_private(file: Path, content: bytes) -> None:
        raise ResileError(f"{file} cannot be written: no space left")

    monkeypatch.setattr(reporting, "write_private", write_private)
    for iteration in range(3 * MAX_WAITING):
        queue.put(checkpoint(iteration))
    assert len(spool.read_bytes().splitlines()) == 3 * MAX_WAITING


async def test_a_spool_that_cannot_be_written_costs_only_the_survival(pool: Pool, tmp_path: Path) -> None:
    await pool.bus("scheduler")
    reader = Reader(await pool.bus("monitor"))
    queue = ReportQueue(await pool.bus("learner"), Spool(tmp_path / "missing" / "facts"))
    queue.put(checkpoint(1))
    await queue.flush()
    await until(lambda: reader.seen == [("checkpoint", 1)])
    reader.task.cancel()


async def test_what_is_kept_after_half_a_line_survives_too(pool: Pool, tmp_path: Path) -> None:
    """The agent before this one ended while it wrote, and this one ends before it could publish anything."""
    await pool.bus("scheduler")
    bus = await pool.bus("learner")
    spool = tmp_path / "facts"
    ReportQueue(bus, Spool(spool)).put(checkpoint(1))
    spool.write_bytes(spool.read_bytes() + b'{"id": "cut sho')
    ReportQueue(bus, Spool(spool)).put(checkpoint(2))
    assert ReportQueue(bus, Spool(spool)).num_facts == 2


async def test_of_half_a_line_nothing_is_left_once_what_precedes_it_is_published(pool: Pool, tmp_path: Path) -> None:
    await pool.bus("scheduler")
    bus = await pool.bus("learner")
    spool = tmp_path / "facts"
    ReportQueue(bus, Spool(spool)).put(checkpoint(1))
    spool.write_bytes(spool.read_bytes() + b'{"id": "cut sho')
    queue = ReportQueue(bus, Spool(spool))
    await queue.flush()
    queue.put(checkpoint(2))
    assert len(spool.read_bytes().splitlines()) == 1


async def test_what_is_kept_once_a_full_disk_has_room_again_survives(pool: Pool, tmp_path: Path) -> None:
    """Half a line may have been written when no space was left."""
    await pool.bus("scheduler")
    bus = await pool.bus("learner")
    spool = tmp_path / "facts"
    queue = ReportQueue(bus, Spool(spool))
    spool.mkdir()
    queue.put(checkpoint(1))
    spool.rmdir()
    spool.write_bytes(b'{"id": "cut sho')
    queue.put(checkpoint(2))
    assert ReportQueue(bus, Spool(spool)).num_facts == 1
