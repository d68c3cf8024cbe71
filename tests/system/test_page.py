"""The page of a real pool: a job is submitted, changed, paused, seen to recover, and fetched in a real browser."""

import asyncio
import re
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from resile.client import AsyncClient, find_server
from resile_shared.messages.jobs import JobState

from ..browser import browsing, needs_browser, tab
from .paced import Pace, becomes, submit
from .pools import pool_up
from .test_restarts import SCRIPT


@needs_browser
@pytest.mark.long
async def test_a_job_is_submitted_changed_paused_followed_through_a_loss_and_fetched(
    tmp_path: Path,
) -> None:
    script = tmp_path / "code" / "train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT.replace("batch_size=48", "batch_size=48, num_shards=24"))
    (script.parent / ".hidden").write_text("left out")
    paces = [Pace(tmp_path / name) for name in ("first", "second")]
    with pool_up(tmp_path / "home", "--hosts", 2, "--slots", 3, "--open-to-chaos") as pool:
        server = find_server(home=pool.home)
        async with AsyncClient(server) as client, browsing() as browser, tab(browser) as seen:
            page = seen.page
            page.set_default_timeout(90_000)
            await page.goto(pool.ask("page")["url"])
            job = await submit_on(page, script.parent, f'--pace "{paces[0].file}"')
            await seen.waits_for(".tile", "6 of 6")
            other = await submit(client, script, "--pace", paces[1].file, name="other", max_workers=6)
            await seen.waits_for(".tile", "3 of 6")
            await seen.picture("training-job")

            await page.click("button:text-is('Priority')")
            await page.fill("#entry", "10000")
            await page.click("button:text-is('Confirm')")
            await seen.waits_for(".tile", "4 of 6")
            assert (await client.job(job)).priority == 10000

            await page.click("button:text-is('Pause')")
            await page.click("button:text-is('Confirm')")
            await seen.waits_for(".badge", "paused")
            await page.click(".brand")
            await seen.waits_for(".tile", "1 paused")
            await becomes(client, other, lambda view: view.workers == 6)
            await seen.picture("training-pool")
            await page.click(".jobs a:text-is('train')")
            await page.click("button:text-is('Resume')")
            await page.click("button:text-is('Confirm')")
            await becomes(client, job, lambda view: view.state is JobState.RUNNING and view.workers == 4)

            kill = asyncio.to_thread(pool.ask, "chaos", "kill", "host", "host-2")
            await page.goto(f"{server.url}/#/jobs/{job}/changes/{(await kill)['traces'][job]}")
            await seen.waits_for(".summary", "host-2 was lost at")
            await seen.waits_for(".summary", "by the attack")
            await seen.waits_for(".step.attack", "kill host host-2")
            await expect(page.locator(".step").first).to_have_class(re.compile("attack"))
            await seen.waits_for(".step", "form generation")
            await seen.picture("host-kill")
            await page.click("nav a:text-is('Scheduler')")
            await seen.waits_for("section:has(#shares) tbody", "other")
            await seen.picture("training-scheduler")
            await page.click(".brand")
            await expect(page.locator("svg .area")).to_have_text([f"train ({job})", f"other ({other})"])
            monitor = pool.service("resile_monitor")
            monitor.kill()
            await asyncio.to_thread(monitor.wait, 60)
            await expect(page.locator("#connection")).to_have_text("live", timeout=90_000)
            await client.set_priority(job, 9000)  # by the monitor that took its place: the page sees it
            await seen.waits_for(".feed", "from 10000 to 9000")
            await expect(page.locator("svg .area")).to_have_text([f"train ({job})", f"other ({other})"])
            await page.goto(f"{server.url}/#/jobs/{job}")

            for pace in paces:
                pace.fast_until(10**6)
            await seen.waits_for("h1 .badge", "completed")
            async with page.expect_download() as download:
                await page.click("a:text-is('Download model')")
            await (await download.value).save_as(tmp_path / "fetched")
            assert pool.run("model", job, "--output", tmp_path / "model").status == 0
            assert (tmp_path / "fetched").read_bytes() == (tmp_path / "model").read_bytes()
            await expect(page.locator(".facts code").nth(1)).to_have_text(pool.view(job)["params_sha256"])
            without_monitor = "Failed to load resource"
            assert [fault for fault in seen.faults if without_monitor not in fault] == []


async def submit_on(page: Page, folder: Path, args: str) -> str:
    """Submit a folder on the page; return the id of the job, whose view is open then."""
    await page.click("nav a:text-is('Submit')")
    await page.set_input_files("#folder", folder)
    await (
        page.locator(".drop", has_text="1 file")
        .locator("text=not sent, as hidden, generated or secret: .hidden")
        .wait_for()
    )
    await page.fill("#args", args)
    await page.fill("#max_workers", "6")
    await page.click("button:text-is('Submit')")
    await page.wait_for_url("**/#/jobs/*")
    return page.url.rpartition("/")[2]
