"""Facts reach the bus in their order and once, whatever becomes of the agent."""

import asyncio
from pathlib import Path

from resile_learner.agent.reporting import ReportQueue, Spool
from resile_shared.bus.client import Bus
from resile_shared.bus.envelope import Received
from resile_shared.bus.subjects import PROGRESS, REPORTS
from resile_shared.messages.message import at
from resile_shared.messages.reports import CheckpointSaved, Progress, Report, Warned
from resile_shared.testing.fixtures import Pool
from resile_shared.testing.waiting import until


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
        self.task = asyncio.create_task(self._read(bus))

    async def _read(self, bus: Bus) -> None:
        """Read progress and facts as they were stored."""
        await asyncio.gather(*(bus.follow(stream, Report, self._note) for stream in (REPORTS, PROGRESS)))

    async def _note(self, received: Received[Report]) -> None:
        content = received.message.content
        self.seen.append((content.kind, getattr(content, "iteration", 0)))


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
