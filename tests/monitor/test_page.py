"""The page in a real browser, on what a real monitor serves of a scene."""

import asyncio
import io
import math
import re
import tarfile
from datetime import UTC, datetime, timedelta
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import Any

import aiohttp
import axe_playwright_python
import pytest
from playwright.async_api import Page, Request, expect
from yarl import URL

from resile_monitor.api.page import HEADERS
from resile_shared.bus import subjects
from resile_shared.http.api import HostList, JobList
from resile_shared.messages.hosts import HostLost, HostState
from resile_shared.messages.jobs import HistoryItem, JobEvent, JobRecord, JobState
from resile_shared.messages.reports import Failed
from resile_shared.policies import PolicyName
from resile_shared.telemetry.traces import set_up_tracing, traced
from resile_testing.waiting import PATIENCE_SECONDS, until

from ..browser import browsing, needs_browser, tab
from .examples import COMPLETED, READY, SPEC, beat, host, job, progress, report, with_history, worker
from .monitors import TOKEN, Monitor, Monitors, Scene
from .spans import message, span
from .test_following import say
from .test_packages import packed

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 2\nValueError: <b>no data</b>'
DROPPED = """() => {
  const transfer = new DataTransfer();
  for (const name of ["train.py", "data.csv", ".secret", "id_rsa"]) transfer.items.add(new File(["1,2\\n"], name));
  return transfer;
}"""
CODE = ("import that", f"print('trains {HOSTILE}')")
NUM_PAGES = 5
"""More than a browser has connections for, were each page to follow the pool, a job and its log by one each."""
HIDE = """(isHidden) => {
  Object.defineProperty(document, "hidden", { value: isHidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""
HIDDEN_LOOK_MS, END_MS = 21_000, 11_000
"""After which a hidden page has asked for the jobs again, and after which it no longer follows one that is over."""
IS_UNSCALED = """(selector) => {
  const chart = document.querySelector(selector);
  const box = chart.getBoundingClientRect();
  const texts = [...chart.querySelectorAll("text")].map((text) => text.getBoundingClientRect());
  return Math.abs(box.height - chart.viewBox.baseVal.height) < 1 && texts.every(({ right }) => right <= box.right + 1);
}"""
"""True in each frame that is shown: a chart is drawn again before the next one, once its width has changed."""
BEGIN = datetime.now(UTC) - timedelta(minutes=4)
PLACES = {
    "jobs/job-1": ".readout >> text=loss 0.05128 at iteration 39",
    "jobs/job-3": ".failure pre",
    "scheduler": "td.reason >> text=waiting for 2 slots",
    "models": ".models th >> text=done",
    "submit": "h1:text-is('Submit a job')",
    "jobs/nothing": ".empty >> text=There is no job nothing",
    "jobs/%zz": ".empty >> text=There is no job %zz",
}
"""Views of the scene, and what is there when one is complete."""


def items(*changes: tuple[int, str, int, str]) -> tuple[HistoryItem, ...]:
    """History items from (seconds after the begin, kind, workers, reason)."""
    return tuple(
        HistoryItem(
            number=number,
            time=BEGIN + timedelta(seconds=seconds),
            kind=kind,
            generation=number,
            workers=workers,
            slots=tuple(f"host-1/{index}" for index in range(workers)),
            iteration=10 * number,
            reason=reason,
        )
        for number, (seconds, kind, workers, reason) in enumerate(changes, start=1)
    )


async def store(scene: Scene, record: JobRecord, history: tuple[HistoryItem, ...], **changes: Any) -> JobRecord:
    """Have a scheduler store and publish a job with its history."""
    for item in history:
        event = JobEvent(
            job=record.job,
            name=record.spec.name,
            tenant="default",
            state=JobState(item.kind) if item.kind in list(JobState) else JobState.RUNNING,
            priority=5000,
            item=item,
        )
        await scene.scheduler.publish(subjects.job_event(record.job, item.kind), event)
    stored = with_history(record, *history).model_copy(update={"unpublished": (), **changes})
    await scene.store_job(stored)
    return stored


async def make_scene(scene: Scene) -> None:
    """Two hosts, of which one was lost, a job that trains, one that waits, one that failed and one that completed."""
    await scene.store_host(host("host-1"))
    await scene.store_host(host("host-2", state=HostState.LOST, reason="silent for 3 s"))
    await scene.registry.publish(
        subjects.host_event("host-2", "lost"),
        HostLost(host="host-2", incarnation=1, time=BEGIN, reason="silent for 3 s"),
    )
    trains = items((0, "accepted", 0, ""), (1, "allocation", 2, "start"), (60, "allocation", 1, "fair share"))
    await store(scene, job("job-1", submitted=BEGIN), trains, generation=3)
    await store(
        scene,
        job(
            "job-2",
            spec=SPEC.model_copy(update={"name": "waits"}),
            state=JobState.QUEUED,
            ready=None,
            submitted=BEGIN,
        ),
        items((70, "accepted", 0, ""), (71, "queued", 0, "waiting for 2 slots")),
    )
    await store(
        scene,
        job("job-3", spec=SPEC.model_copy(update={"name": HOSTILE}), state=JobState.FAILED),
        items((80, "accepted", 0, ""), (81, "failed", 0, f"ValueError: {HOSTILE}")),
    )
    await store(
        scene,
        job("job-4", spec=SPEC.model_copy(update={"name": "done"}), state=JobState.COMPLETED, completed=COMPLETED),
        items((20, "accepted", 0, ""), (21, "allocation", 1, "start"), (60, "completed", 0, "")),
    )
    failed = Failed(message="ValueError", details=TRACEBACK)
    await scene.learner.publish(subjects.report("job-3", "failed"), report(failed, name="job-3"))
    for iteration in range(1, 40):
        content = progress(iteration, loss=2.0 / iteration, metrics={"accuracy": 1 - 1 / iteration})
        await scene.learner.publish(subjects.report("job-1", "progress"), report(content, generation=3))
    await scene.learner.send(subjects.heartbeat("host-1"), beat(worker(0)))
    await say(scene, f"line {HOSTILE}", "second line")


async def has_the_scene(monitor: Monitor) -> None:
    """Wait until the monitor has all of it, so that what its API says stays as it is."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            jobs, hosts = await monitor.get("/v1/jobs", JobList), await monitor.get("/v1/hosts", HostList)
            used = sum(slot.job is not None for view in hosts.hosts for slot in view.slots)
            if [view.iteration for view in jobs.jobs if view.id == "job-1"] == [39] and len(jobs.jobs) == 4 and used:
                return
            await asyncio.sleep(0.05)


async def serious_faults(page: Page) -> list[str]:
    """What axe-core finds that keeps people out."""
    await page.evaluate(AXE)
    found = await page.evaluate("axe.run()")
    return [
        f"{violation['id']}: {node['html'][:120]}"
        for violation in found["violations"]
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]


@needs_browser
async def test_the_pool_is_shown_as_the_api_has_it(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    await make_scene(scene)
    await has_the_scene(monitor)
    async with browsing() as browser, tab(browser) as seen:
        await seen.open(monitor.url, token=TOKEN)
        await seen.waits_for(".feed", "lost")
        await expect(seen.page).to_have_url(re.compile("#/$"))
        jobs, hosts = await monitor.get("/v1/jobs", JobList), await monitor.get("/v1/hosts", HostList)
        for shown in jobs.jobs:
            row = seen.page.locator(".jobs tr", has_text=shown.id)
            workers = f"{shown.workers} of {shown.max_workers}"
            for text in (shown.name, shown.state, workers, " ".join(shown.reason.split())):
                await expect(row).to_contain_text(text, use_inner_text=True)
        slots = [slot for view in hosts.hosts if view.state == "up" for slot in view.slots]
        used = sum(slot.job is not None for slot in slots)
        await seen.shows(".tiles", f"{used} of {len(slots)}", "1 up 1 lost")
        await expect(seen.page.locator(".slots .c1")).to_have_count(used)
        held = [f"{view.name} ({view.id})" for view in jobs.jobs if view.id in ("job-1", "job-4")]
        await expect(seen.page.locator("svg .area")).to_have_text(held)
        await expect(seen.page.locator("svg[role=img]")).to_have_attribute("aria-label", re.compile("now digits 1$"))

        trains = job("job-1", generation=4)
        grown = items(
            (0, "accepted", 0, ""), (1, "allocation", 2, ""), (60, "allocation", 1, ""), (90, "allocation", 2, "grown")
        )
        await store(scene, trains, grown[3:], num_items=4)
        await seen.waits_for(".jobs tr", "2 of 8")
        await seen.waits_for(".feed", "grown")
        assert seen.faults == []


@needs_browser
async def test_a_job_is_shown_with_its_curves_its_history_and_its_log(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    await make_scene(scene)
    members = [tarfile.TarInfo(name) for name in ("a/module.py", "train.py")]
    for member, text in zip(members, CODE, strict=True):
        member.size = len(text)
    contents = [(member, text.encode()) for member, text in zip(members, CODE, strict=True)]
    monitors.storage.put(SPEC.package, [packed(*contents)])
    async with browsing() as browser, tab(browser) as seen:
        await seen.open(monitor.url, token=TOKEN)
        await seen.page.click(".jobs a:text-is('digits')")
        await seen.waits_for(".readout", "loss 0.05128 at iteration 39")
        await seen.waits_for(".readout", "accuracy 0.9744 at iteration 39")
        await seen.waits_for(".log", "second line")
        rows = seen.page.locator("section:has(#history) tbody tr")
        await expect(rows.locator("th")).to_have_text(["3", "2", "1"])
        await expect(rows.first).to_contain_text("fair share")
        await scene.learner.publish(subjects.report("job-1", "progress"), report(progress(40, loss=0.5), generation=3))
        await seen.waits_for(".readout", "loss 0.5 at iteration 40")
        await say(scene, "third line")
        await seen.waits_for(".log", "third line")
        await seen.page.click("summary:text-is('Submitted code')")
        await seen.waits_for(".code pre", CODE[1])
        await expect(seen.page.locator(".code summary code")).to_have_text(["train.py", "a/module.py"])
        assert seen.faults == []


@needs_browser
async def test_pages_of_one_browser_do_not_keep_each_other_waiting(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    await make_scene(scene)
    async with browsing() as browser, tab(browser) as seen:
        await seen.open(monitor.url, token=TOKEN)
        pages = [seen.page, *[await seen.page.context.new_page() for _ in range(NUM_PAGES - 1)]]
        for page in pages:
            await page.goto(f"{monitor.url}/#/jobs/job-1")
            await page.locator(".log", has_text="second line").wait_for()
            await page.locator(".readout", has_text="loss 0.05128").wait_for()
        await say(scene, "third line", "fourth line")
        for page in pages:
            await expect(page.locator(".log .line")).to_have_text([re.compile("line")] * 4)
            await expect(page.locator(".log .line").last).to_contain_text("fourth line")


@needs_browser
async def test_a_page_that_nobody_sees_follows_nothing_and_catches_up(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    await make_scene(scene)
    async with browsing() as browser, tab(browser) as seen:
        await seen.open(monitor.url, token=TOKEN)
        pages = [seen.page, *[await seen.page.context.new_page() for _ in range(2 * NUM_PAGES)]]
        for page in pages:
            await page.goto(f"{monitor.url}/#/jobs/job-1")
            await page.locator(".log", has_text="second line").wait_for()
            await page.evaluate(HIDE, True)
        await say(scene, "third line")
        await seen.page.evaluate(HIDE, False)
        await seen.waits_for(".log", "third line")
        assert seen.faults == []


@needs_browser
async def test_a_page_that_nobody_saw_when_its_job_ended_shows_the_end(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    await make_scene(scene)
    async with browsing() as browser, tab(browser) as seen:
        await seen.page.clock.install()
        await seen.open(monitor.url, token=TOKEN)
        await seen.page.goto(f"{monitor.url}/#/jobs/job-1")
        await seen.waits_for(".log", "second line")
        await seen.page.evaluate(HIDE, True)
        await say(scene, "third line")
        await scene.store_job(job(state=JobState.COMPLETED, completed=COMPLETED))
        await seen.page.clock.fast_forward(HIDDEN_LOOK_MS)
        await seen.waits_for(".badge", "completed")
        await seen.page.clock.fast_forward(END_MS)
        await seen.page.evaluate(HIDE, False)
        await seen.waits_for(".log", "third line")
        assert seen.faults == []


@needs_browser
async def test_times_and_durations_are_written_for_people(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    async with browsing() as browser, tab(browser, locale="en-US", timezone_id="UTC") as seen:
        await seen.open(monitor.url, token=TOKEN)
        found = await seen.page.evaluate("""async () => {
          const { duration, moment, number, time, timeOrDay } = await import("/page/format.js");
          const lengths = [0, 0.0000004, 0.00025, 0.0126, 0.9996, 1.66, 9.96, 59.4, 59.6, 112, 120, 601, 3700, 1e6];
          const at = "2026-01-02T15:04:05.678Z";
          return [lengths.map(duration), time(at), timeOrDay(at), moment(at), number(0.123456)];
        }""")
    lengths, *rest = found
    wanted = "0 ms;1 µs;250 µs;13 ms;1 s;1.7 s;10 s;59 s;1 min;1 min 52 s;2 min;10 min;1 h 1 min;11 days"
    assert lengths == wanted.split(";")
    assert rest == ["15:04:05", "Jan 2, 15:04:05", "Jan 2, 2026, 15:04:05", "0.1235"]


@needs_browser
async def test_an_address_that_names_no_view_says_so(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    async with browsing() as browser, tab(browser) as seen:
        await seen.open(monitor.url, token=TOKEN)
        await seen.page.goto(f"{monitor.url}/#/nonsense")
        await seen.waits_for("h1", "There is no such view")
        await seen.waits_for("main code", "#/nonsense")
        await seen.page.click("main a:text-is('Go to the pool')")
        await seen.waits_for("dt", "Slots in use")


@needs_browser
@pytest.mark.parametrize(("state", "verb"), [(HostState.UP, "drain"), (HostState.DRAINING, "undrain")])
async def test_a_host_is_drained_and_undrained(monitors: Monitors, scene: Scene, state: HostState, verb: str) -> None:
    await scene.store_host(host(state=state))
    monitor = await monitors.start()
    async with browsing() as browser, tab(browser) as seen:
        await seen.open(monitor.url, token=TOKEN)
        await seen.page.click(f"article button:text-is('{verb.capitalize()}')")
        async with seen.page.expect_request(lambda request: request.method == "POST") as request:
            await seen.page.click("dialog button:text-is('Confirm')")
        assert (await request.value).url == f"{monitor.url}/v1/hosts/host-1/{verb}"


def is_submission(request: Request) -> bool:
    return request.method == "POST" and request.url.endswith("/v1/jobs")


@needs_browser
async def test_files_are_dropped_and_submitted_with_what_the_form_says(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    async with browsing() as browser, tab(browser) as seen:
        await seen.open(monitor.url, token=TOKEN)
        await seen.page.click("nav a:text-is('Submit')")
        await seen.page.click("button:text-is('Submit')")
        dropped = await seen.page.evaluate_handle(DROPPED)
        await seen.page.dispatch_event(".drop", "drop", {"dataTransfer": dropped})
        await seen.waits_for(".drop", "2 files")
        await seen.waits_for(".drop", "not sent, as hidden, generated or secret: .secret, id_rsa")
        for field, text in {"args": '--lr 0.1 --note "first try"', "requirements": "einops>=0.8 tiny==1.2"}.items():
            await seen.page.fill(f"#{field}", text)
        async with seen.page.expect_request(is_submission) as request:
            await seen.page.click("button:text-is('Submit')")
        body = (await request.value).post_data_json
        assert body["args"] == ["--lr", "0.1", "--note", "first try"]
        assert body["requirements"] == ["einops>=0.8", "tiny==1.2"]
        assert (body["name"], body["script"]) == ("train", "train.py")
        packed = monitors.storage.read(body["package"])
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            assert sorted(archive.getnames()) == ["data.csv", "train.py"]


@needs_browser
async def test_the_scheduler_says_who_has_what_and_what_others_wait_for(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    await make_scene(scene)
    await has_the_scene(monitor)
    async with browsing() as browser, tab(browser) as seen:
        await seen.open(monitor.url, token=TOKEN)
        await seen.page.click("nav a:text-is('Scheduler')")
        await seen.waits_for("h2", "Policy: fairshare")
        rows = seen.page.locator("section:has(#shares) tbody tr")
        await expect(rows).to_have_count(1)
        slots = sum(len(view.slots) for view in (await monitor.get("/v1/hosts", HostList)).hosts if view.state == "up")
        await expect(rows).to_contain_text(f"1 of {slots}")
        await expect(rows).to_contain_text("fair share")
        await expect(seen.page.locator("section:has(#waiting) tbody tr")).to_contain_text("waiting for 2 slots")
        await expect(seen.page.locator("section:has(#tenants) tbody tr")).to_contain_text("default")
        await expect(seen.page.locator("p.sentence")).to_have_text(f"{PolicyName.FAIRSHARE.description}.")
        await seen.page.click("[data-key='policy']")
        await expect(seen.page.locator("select#policy option")).to_have_text(list(PolicyName))
        assert seen.faults == []


@needs_browser
async def test_a_button_that_changes_while_it_is_pressed_is_clicked(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    trains = items((0, "accepted", 0, ""), (1, "allocation", 2, "start"), (60, "allocation", 1, "fair share"))
    await store(scene, job("job-1"), trains[:2], generation=2)
    async with browsing() as browser, tab(browser) as seen:
        await seen.open(monitor.url, token=TOKEN)
        await seen.page.click(".jobs a:text-is('digits')")
        await seen.waits_for(".head", "start")
        await seen.page.hover("button:text-is('Priority')")
        await seen.page.mouse.down()
        await store(scene, job("job-1"), trains, generation=3)
        await seen.waits_for(".tile", "1 of 8")
        await seen.page.mouse.up()
        await expect(seen.page.locator("#entry")).to_be_focused()
        await seen.waits_for(".head", "fair share")
        assert seen.faults == []


@needs_browser
async def test_names_reasons_and_logs_are_text_and_a_failure_comes_first(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    await make_scene(scene)
    async with browsing() as browser, tab(browser) as seen:
        seen.page.on("dialog", lambda dialog: seen.faults.append(f"dialog {dialog.message}"))
        await seen.open(monitor.url, token=TOKEN)
        await seen.waits_for(".jobs", HOSTILE)
        await seen.page.goto(f"{monitor.url}/#/jobs/job-3")
        await seen.waits_for(".failure pre", "<b>no data</b>")
        await seen.shows("h1", HOSTILE)
        await seen.page.goto(f"{monitor.url}/#/jobs/job-1")
        await seen.waits_for(".log", HOSTILE)
        assert await seen.page.locator("main img, main script, main b").count() == 0
        assert seen.faults == []


@needs_browser
async def test_a_script_that_gets_into_the_page_does_not_run(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    async with browsing() as browser, tab(browser) as seen:
        await seen.open(monitor.url, token=TOKEN)
        add = "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s)"
        await seen.page.evaluate(add)
        assert await seen.page.evaluate("window.ran") is None
        await until(lambda: "Content Security Policy" in " ".join(seen.faults))


@needs_browser
async def test_the_page_asks_for_the_token_and_scripts_cannot_read_the_cookie(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    async with browsing() as browser, tab(browser) as seen:
        await seen.page.goto(monitor.url)
        await seen.page.fill("#token", "wrong-token-of-somebody")
        await seen.page.click("button:text-is('Log on')")
        await seen.waits_for(".error", "wrong token")
        await seen.page.fill("#token", TOKEN)
        await seen.page.keyboard.press("Enter")
        await seen.waits_for(".tile", "Slots in use")
        assert await seen.page.evaluate("document.cookie") == ""
        await seen.page.reload()
        await seen.waits_for(".tile", "Slots in use")
        await seen.page.click("#log-off")
        await seen.page.wait_for_selector("#token")


@needs_browser
async def test_the_page_comes_back_by_itself_after_a_restart_of_the_monitor(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    await make_scene(scene)
    async with browsing() as browser, tab(browser) as seen:
        await seen.open(monitor.url, token=TOKEN)
        await seen.waits_for(".feed", "lost")
        await expect(seen.page.locator(".slots .c1")).to_have_count(1)
        feed, hosts = await seen.text(".feed"), await seen.text(".hosts")
        await monitor.kill()
        await seen.waits_for("#connection", "disconnected")
        await seen.picture("disconnected")
        await store(
            scene,
            job("job-5", spec=SPEC.model_copy(update={"name": "later"}), ready=READY, state=JobState.ACCEPTED),
            items((100, "accepted", 0, "")),
        )
        await monitors.start(port=int(URL(monitor.url).port or 0))
        await seen.waits_for("#connection", "live")
        await seen.waits_for(".jobs", "later")
        await seen.waits_for(".feed", "later")
        assert (await seen.text(".feed")).count("lost") == feed.count("lost")
        await expect(seen.page.locator(".hosts")).to_have_text(hosts, use_inner_text=True)


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_nobody_is_kept_out(monitors: Monitors, scene: Scene, scheme: Any) -> None:
    monitor = await monitors.start()
    async with browsing() as browser, tab(browser, color_scheme=scheme, viewport={"width": 390, "height": 844}) as seen:
        await seen.page.goto(monitor.url)
        await seen.page.wait_for_selector("#token")
        assert await serious_faults(seen.page) == []
        await seen.open(monitor.url, token=TOKEN)
        await seen.waits_for(".empty", "No job has been submitted yet.")
        assert await serious_faults(seen.page) == []
        await seen.picture(f"empty-{scheme}")
        await make_scene(scene)
        await seen.waits_for(".feed", "lost")
        assert await serious_faults(seen.page) == []
        await seen.page.wait_for_function(IS_UNSCALED, arg="svg[role=img]")
        await seen.picture(f"pool-{scheme}")
        for place, shown in PLACES.items():
            await seen.page.goto(f"{monitor.url}/#/{place}")
            await seen.page.wait_for_selector(shown)
            assert await serious_faults(seen.page) == [], place
            await seen.picture(f"{re.sub('[^a-z0-9]', '-', place)}-{scheme}")
            assert await seen.page.evaluate("document.documentElement.scrollWidth") <= 390, place
        await seen.page.goto(f"{monitor.url}/#/jobs/job-1")
        await seen.page.click("button:text-is('Priority')")
        await expect(seen.page.locator("#entry")).to_be_focused()
        assert await serious_faults(seen.page) == []
        await seen.picture(f"dialog-{scheme}")
        await seen.page.keyboard.press("Escape")
        await expect(seen.page.locator("dialog")).to_have_count(0)


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_change_is_shown_step_by_step(monitors: Monitors, scene: Scene, scheme: Any) -> None:
    monitor = await monitors.start("--trace-url", "http://127.0.0.1:16686/trace/{trace}")
    set_up_tracing("test")
    with traced("cause") as cause:
        changed = items((0, "accepted", 0, ""), (1, "allocation", 2, "start"))
        await store(scene, job("job-1", generation=2), changed)
    trace = f"{cause.get_span_context().trace_id:032x}"
    steps = [
        span(1, "carry out allocation", begin=1.0, end=1.1, trace=trace),
        span(2, "handle resile.report.{job}.ready", begin=1.1, end=1.2, trace=trace, parent=1),
        span(3, "form generation", begin=1.2, end=1.5, trace=trace, parent=2),
        span(4, "iteration", begin=1.5, end=2.0, trace=trace, parent=3, worker=0, iteration=20),
        span(5, "prepare worker", begin=1.3, end=1.4, trace=trace, parent=3, job="job-2", note=HOSTILE),
    ]
    await scene.learner.send(subjects.trace("learner"), message(*steps))
    await monitor.answers(f"/v1/traces/{trace}", 200)
    async with browsing() as browser, tab(browser, color_scheme=scheme, viewport={"width": 390, "height": 844}) as seen:
        await seen.open(monitor.url, token=TOKEN)
        await seen.page.goto(f"{monitor.url}/#/jobs/job-1")
        await seen.page.click("section:has(#history) a:text-is('allocation')")
        await seen.page.wait_for_url(f"**/#/jobs/job-1/changes/{trace}")
        await seen.waits_for(".summary", "digits was submitted at")
        await expect(seen.page.locator(".step")).to_have_count(3)
        await seen.page.wait_for_function(IS_UNSCALED, arg=".waterfall svg")
        await seen.picture(f"change-{scheme}")
        link = seen.page.locator("a:text-is('The whole trace in the collector')")
        await expect(link).to_have_attribute("href", f"http://127.0.0.1:16686/trace/{trace}")
        await expect(seen.page.locator(".waterfall .legend li")).to_have_text(["learner"])
        await seen.waits_for(".step", "form generation")
        assert "Z" not in await seen.text(".summary"), "times are those of the clock here"
        await seen.page.locator(".step").first.focus()
        await seen.page.keyboard.press("ArrowDown")
        await seen.waits_for(".details h3", "form generation")
        await seen.page.check("#all")
        await expect(seen.page.locator(".step")).to_have_count(5)
        await seen.page.locator(".step", has_text="prepare worker").click()
        await seen.waits_for(".details", HOSTILE)
        assert await serious_faults(seen.page) == []
        assert await seen.page.evaluate("document.documentElement.scrollWidth") <= 390
        await seen.page.goto(f"{monitor.url}/#/jobs/job-1/changes/{'0' * 32}")
        await seen.waits_for(".waterfall .empty", "no longer kept")
        await seen.waits_for(".head .empty", "no such change")
        assert await serious_faults(seen.page) == []
        assert [fault for fault in seen.faults if "404" not in fault] == []


async def test_the_files_of_the_page_are_served_and_nothing_else(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    async with aiohttp.ClientSession(monitor.url) as browser:
        for file in (resources.files("resile_monitor") / "page").iterdir():
            answer = await browser.get(f"/page/{file.name}")
            assert (answer.status, await answer.read()) == (200, file.read_bytes())
            assert HEADERS.items() <= dict(answer.headers).items()
            known = {"If-None-Match": answer.headers["ETag"]}
            assert (await browser.get(f"/page/{file.name}", headers=known)).status == 304
        assert (await browser.get("/", headers={"Accept": "text/html"})).content_type == "text/html"
        assert await (await browser.get("/")).json() == {"service": "resile", "api": "/v1", "docs": "docs/api.md"}
        for path in ("/page/nothing.js", "/page/..%2fservice.py", "/page/%2e%2e/settings.py"):
            assert (await browser.get(URL(monitor.url + path, encoded=True))).status == 404


def test_colours_of_jobs_differ_and_numbers_on_them_can_be_read() -> None:
    text = (resources.files("resile_monitor") / "page" / "style.css").read_text()
    colours = [bytes.fromhex(found) for found in re.findall(r"--c\d: #([0-9a-f]{6})", text)]
    assert len(colours) == 10
    (ink,) = re.findall(r"color: #([0-9a-f]{6}); background: var\(--own\)", text)
    for colour in colours:
        assert (luminance(colour) + 0.05) / (luminance(bytes.fromhex(ink)) + 0.05) >= 4.5, colour.hex()
    for first, second in combinations(colours, 2):
        assert math.dist(first, second) > 40, (first.hex(), second.hex())


def luminance(colour: bytes) -> float:
    """The relative luminance of WCAG 2."""
    channels = [part / 3294.6 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in colour]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), channels, strict=True))


def test_the_page_asks_nobody_outside() -> None:
    for file in (resources.files("resile_monitor") / "page").iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, file.name
