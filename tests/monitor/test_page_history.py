"""What the page shows of the past is the same after a restart of the monitor, whatever has become of the reports."""

import re
from datetime import UTC, datetime, timedelta

from playwright.async_api import expect

from resile_shared.bus import subjects
from resile_shared.bus.subjects import EVENTS, PROGRESS
from resile_shared.http.slot_history import SlotsView

from ..browser import Tab, browsing, needs_browser, tab
from .days import DAY, Day, store_day
from .examples import progress, report
from .monitors import TOKEN, Monitors, Scene
from .test_page import BEGIN, has_the_scene, make_scene, serious_faults

SUBJECT = subjects.report("job-1", "progress")
READ = (
    "loss 0.05128 at iteration 39",
    "accuracy 0.9744 at iteration 39",
    "validation accuracy 0.5 at iteration 41",
    "iterations per second 2 at iteration 41",
)


async def train(scene: Scene, *iterations: int) -> None:
    """Two iterations a second."""
    for iteration in iterations:
        told = report(progress(iteration, loss=None, validation={"accuracy": 0.5}, ends_epoch=True), generation=3)
        at_once = told.model_copy(update={"time": BEGIN + timedelta(seconds=iteration / 2)})
        await scene.learner.publish(SUBJECT, at_once)


@needs_browser
async def test_curves_are_the_same_after_a_restart_without_the_reports(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    await make_scene(scene)
    await has_the_scene(monitor)
    await train(scene, 40, 41)
    async with browsing() as browser, tab(browser) as seen:
        await seen.open(f"{monitor.url}", token=TOKEN)
        await seen.page.goto(f"{monitor.url}/#/jobs/job-1")
        for text in READ:
            await seen.waits_for(".readout", text)
        port = int(monitor.url.rpartition(":")[2])
        monitor.process.terminate()
        await monitor.process.wait()
        await scene.scheduler.purge(PROGRESS.name, SUBJECT)
        await expect(seen.page.locator("#connection")).to_have_text(re.compile("disconnected"))
        await monitors.start(port=port)
        await expect(seen.page.locator("#connection")).to_have_text("live")
        await train(scene, 42, 43)
        await seen.waits_for(".readout", "iterations per second 2 at iteration 43")
        await seen.page.reload()
        for text in READ[:2]:
            await seen.waits_for(".readout", text)
        await seen.waits_for(".readout", "iterations per second 2 at iteration 43")


async def chart_of_the_day(seen: Tab) -> dict[str, str]:
    """The form of each job's area in the chart of 24 hours, as far as it does not move with the clock."""
    await seen.page.locator("label", has_text="24 h").click()
    await expect(seen.page.locator("svg .area")).to_have_count(100)
    read = "areas => areas.map(a => [a.textContent, a.getAttribute('d').split('Z').length])"
    return dict(await seen.page.locator("svg .area").evaluate_all(read))


@needs_browser
async def test_a_day_of_many_jobs_is_drawn_and_the_same_after_a_restart_without_the_events(
    monitors: Monitors, scene: Scene
) -> None:
    """100 jobs, 1,000 slots, thousands of events, of which the page gets the newest; three hosts were lost."""
    day = Day(num_jobs=100, num_slots=1000, end=datetime.now(UTC))
    num = await store_day(day, scene)
    monitor = await monitors.start()
    view = await monitor.get("/v1/slots", SlotsView)
    assert (view.sequence, len(view.jobs), max(view.slots.values)) == (num, 100, 1000)
    assert view.end - view.begin > 0.9 * DAY.total_seconds() * 1000
    assert sum(mark.kind == "lost" for mark in view.marks) == 3
    assert sum(mark.kind == "submitted" for mark in view.marks) == 100
    for time, total in zip(view.held.times, view.held.values, strict=True):
        of_jobs = [
            [value for begin, value in zip(job.held.times, job.held.values, strict=True) if begin <= time]
            for job in view.jobs
        ]
        assert sum(values[-1] for values in of_jobs if values) == total <= 1000
    async with browsing() as browser, tab(browser) as seen:
        await seen.open(monitor.url, token=TOKEN)
        before = await chart_of_the_day(seen)
        await expect(seen.page.locator("svg .mark.lost")).not_to_have_count(0)
        box = await seen.page.evaluate("document.querySelector('.chart svg').getBoundingClientRect().toJSON()")
        await seen.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] * 0.9)
        await seen.waits_for(".readout", "slots in use")
        await expect(seen.page.locator("svg .area.chosen")).to_have_count(1)
        assert await serious_faults(seen.page) == []
        monitor.process.terminate()
        await monitor.process.wait()
        for job in day.records:
            await scene.scheduler.purge(EVENTS.name, subjects.job_events(job))
        again = await monitors.start(port=int(monitor.url.rpartition(":")[2]))
        assert await again.get("/v1/slots", SlotsView) == view
        await seen.page.reload()
        assert (await chart_of_the_day(seen)).keys() == before.keys()
        starting = re.compile("ERR_CONNECTION|503")
        assert [fault for fault in seen.faults if not starting.search(fault)] == []
