"""Curves outlast reports and monitors, several monitors store the same ones, and they go with their job."""

import asyncio
import signal
from typing import Any

from resile_monitor.history.curve_store import CurveStore
from resile_monitor.projection import Projection
from resile_shared.bus.client import Bus
from resile_shared.bus.envelope import Received
from resile_shared.bus.subjects import CURVES, PROGRESS
from resile_shared.http.api import CurvesView
from resile_shared.messages.reports import Report
from resile_testing.fixtures import Pool
from resile_testing.waiting import PATIENCE_SECONDS

from .examples import job, progress, report
from .monitors import Monitor, Monitors, Scene

SUBJECT = "resile.report.job-1.progress"


async def train(scene: Scene, *iterations: int, **fields: Any) -> None:
    for iteration in iterations:
        await scene.learner.publish(SUBJECT, report(progress(iteration, loss=1 / iteration, **fields)))


async def curves(monitor: Monitor, *, until: int) -> CurvesView:
    """Wait until a monitor has the point of that iteration."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            found = await monitor.get("/v1/jobs/job-1/curves", CurvesView)
            if found.training.iterations[-1:] == (until,):
                return found
            await asyncio.sleep(0.05)


async def test_curves_outlast_reports_and_monitors(monitors: Monitors, scene: Scene) -> None:
    await scene.store_job(job())
    await train(scene, 1, 2)
    await train(scene, 3, validation={"accuracy": 0.5}, ends_epoch=True)
    first = await monitors.start()
    before = await curves(first, until=3)
    assert before.training.values == {"loss": (1.0, 0.5, 0.3333333)}
    assert before.training.workers == (2, 2, 2)
    assert before.validation.values == {"accuracy": (0.5,)}
    first.process.send_signal(signal.SIGTERM)
    assert await first.process.wait() == 0
    await scene.scheduler.purge(PROGRESS.name, SUBJECT)
    second = await monitors.start()
    assert await curves(second, until=3) == before
    await train(scene, 4)
    longer = await curves(second, until=4)
    assert longer.training.iterations == (1, 2, 3, 4)
    await second.kill()
    third = await monitors.start()
    assert await curves(third, until=4) == longer, "what it had not stored is read again"


async def test_a_job_that_never_reported_has_empty_curves(monitors: Monitors, scene: Scene) -> None:
    await scene.store_job(job())
    monitor = await monitors.start()
    assert (await monitor.get("/v1/jobs/job-1/curves", CurvesView)).training.iterations == ()
    assert "there is no job job-7" in (await monitor.problem("GET", "/v1/jobs/job-7/curves")).detail


class Keeper:
    """A curve store, and what it is told."""

    def __init__(self, bus: Bus) -> None:
        self.projection = Projection()
        self.store = CurveStore(bus, self.projection)
        self.projection.store_job("job-1", job(), revision=1)

    async def hear(self, *iterations: int) -> None:
        for iteration in iterations:
            told = report(progress(iteration))
            await self.store.on_report(Received[Report](told, "", SUBJECT, "", "", sequence=iteration))

    async def iterations(self) -> tuple[int, ...]:
        return (await self.store.curves("job-1")).training.iterations


async def test_monitors_that_store_the_same_curves_do_not_disturb_each_other(pool: Pool) -> None:
    await pool.bus("registry")
    bus = await pool.bus("monitor")
    one, two = Keeper(bus), Keeper(bus)
    await one.hear(1, 2)
    await two.hear(1)
    await one.store.store()
    await two.store.store()
    await two.hear(2, 3)
    await two.store.store()
    await one.store.store()
    await one.hear(3, 4)
    await one.store.store()  # two was first: it learns the revision
    await one.store.store()
    stored = await bus.bucket(CURVES).get("job-1")
    assert stored is not None
    assert stored.value.training.iterations == (1, 2, 3, 4)
    assert stored.value.sequence == 4
    assert await two.iterations() == (1, 2, 3), "what it keeps is its own"


async def test_a_job_whose_curves_are_not_in_memory_goes_on_where_they_end(pool: Pool) -> None:
    await pool.bus("registry")
    keeper = Keeper(await pool.bus("monitor"))
    await keeper.hear(1, 2)
    await keeper.store.store()
    await keeper.store.store()  # nothing new: forgotten
    assert keeper.store._jobs.kept == {}
    assert await keeper.iterations() == (1, 2)
    await keeper.hear(3)
    assert await keeper.iterations() == (1, 2, 3)


async def test_curves_are_removed_with_their_job(pool: Pool) -> None:
    """By the scheduler, with all it stores; and by a monitor that stored some after that."""
    scheduler = await pool.bus("scheduler")
    bus = await pool.bus("monitor")
    keeper = Keeper(bus)
    await keeper.hear(1)
    await keeper.store.store()
    await scheduler.purge(CURVES.stream, CURVES.subject("job-1"))
    assert await bus.bucket(CURVES).get("job-1") is None
    await keeper.hear(2)
    await keeper.store.store()  # refused: what it replaces is gone
    await keeper.store.store()
    assert await bus.bucket(CURVES).get("job-1") is not None
    keeper.projection.store_job("job-1", None, revision=2)
    await keeper.store.store()
    assert await bus.bucket(CURVES).get("job-1") is None


async def test_reports_are_read_that_follow_a_lost_end_of_the_stream(pool: Pool, scene: Scene) -> None:
    """It does not wait for the disk: a monitor has seen reports that the bus forgets when its machine fails."""
    bus = await pool.bus("monitor")
    keeper = Keeper(bus)
    await keeper.hear(1, 2, 9)
    await keeper.store.store()
    await train(scene, 1, 2, 3)
    other = Keeper(bus)
    assert await other.store.load({"job-1": 3}) == 0
    told = report(progress(10))
    await other.store.on_report(Received[Report](told, "", SUBJECT, "", "", sequence=4))
    await other.store.store()
    stored = await bus.bucket(CURVES).get("job-1")
    assert stored is not None
    assert (stored.value.sequence, stored.value.training.iterations) == (4, (1, 2, 9, 10))


async def test_a_job_that_never_gets_a_record_is_forgotten(pool: Pool) -> None:
    await pool.bus("registry")
    keeper = Keeper(await pool.bus("monitor"))
    keeper.projection.store_job("job-1", None, revision=2)
    await keeper.hear(1)
    for _ in range(30):
        await keeper.store.store()
    assert keeper.store._jobs.kept == {}
