"""What the page shows of the past is the same after a restart of the monitor, whatever has become of the reports."""

import re
from datetime import timedelta

from playwright.async_api import expect

from resile_shared import subjects
from resile_shared.subjects import PROGRESS

from ..browser import browsing, needs_browser, tab
from .examples import progress, report
from .monitors import TOKEN, Monitors, Scene
from .test_page import BEGIN, has_the_scene, make_scene

SUBJECT = subjects.report("job-1", "progress")
READ = ("loss 0.05128 at 39", "accuracy 0.9744 at 39", "validation accuracy 0.5 at 41", "iterations per second 2 at 41")


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
        await seen.waits_for(".readout", "iterations per second 2 at 43")
        await seen.page.reload()
        for text in READ[:2]:
            await seen.waits_for(".readout", text)
        await seen.waits_for(".readout", "iterations per second 2 at 43")
