"""The models of completed jobs: by the API, and on the page."""

from playwright.async_api import expect

from resile_shared.http.api import JobView, ModelList
from resile_shared.messages.jobs import JobState
from resile_shared.messages.message import at

from ..browser import browsing, needs_browser, tab
from .examples import COMPLETED, SPEC, job
from .monitors import TOKEN, Monitors, Scene
from .test_page import HOSTILE, serious_faults


async def store_models(scene: Scene) -> None:
    """Two jobs that left models, one that completed without a file, and one that trains."""
    for number, name in ((1, "first"), (2, HOSTILE)):
        completed = COMPLETED.model_copy(update={"params_sha256": f"{number:02}" * 32, "loss": 0.5 / number})
        spec = SPEC.model_copy(update={"name": name, "args": ("--lr", f"0.{number}")})
        done = job(f"job-{number}", spec=spec, state=JobState.COMPLETED, completed=completed, ended=at(100.0 * number))
        await scene.store_job(done)
    without = COMPLETED.model_copy(update={"model": None})
    await scene.store_job(job("job-3", state=JobState.COMPLETED, completed=without, ended=at(900.0)))
    await scene.store_job(job("job-4"))


async def store_failed(scene: Scene) -> None:
    """A job that failed after its training, and one that failed before."""
    done = {"state": JobState.FAILED, "reason": "exit status 3, after training was complete", "ended": at(1000.0)}
    await scene.store_job(job("job-5", completed=COMPLETED, **done))
    await scene.store_job(job("job-6", **done))


async def test_a_job_that_failed_after_its_training_has_its_model_and_says_that_it_failed(
    monitors: Monitors, scene: Scene
) -> None:
    await store_failed(scene)
    monitors.storage.put("jobs/job-5/models/lineage-1.safetensors", [b"model"])
    monitor = await monitors.start()
    (model,) = (await monitor.get("/v1/models", ModelList)).models
    assert (model.job, model.state, model.reason) == ("job-5", "failed", "exit status 3, after training was complete")
    async with monitor.http.get("/v1/jobs/job-5/model") as answer:
        assert await answer.read() == b"model"
    views = [await monitor.get(f"/v1/jobs/{name}", JobView) for name in ("job-5", "job-6")]
    assert [view.has_model for view in views] == [True, False]
    assert "it failed before its training ended" in (await monitor.problem("GET", "/v1/jobs/job-6/model")).detail


@needs_browser
async def test_the_page_offers_the_model_of_a_job_that_failed_after_its_training(
    monitors: Monitors, scene: Scene
) -> None:
    await store_failed(scene)
    monitor = await monitors.start()
    async with browsing() as browser, tab(browser) as seen:
        await seen.open(monitor.url, token=TOKEN)
        await seen.page.click("nav >> text=Models")
        await expect(seen.page.locator("tbody tr")).to_contain_text("failed")
        assert await serious_faults(seen.page) == []
        for name, number in (("job-5", 1), ("job-6", 0)):
            await seen.page.goto(f"{monitor.url}/#/jobs/{name}")
            await expect(seen.page.locator("a:text-is('Download output')")).to_have_count(1)
            await expect(seen.page.locator("a:text-is('Download model')")).to_have_count(number)


async def test_the_newest_model_comes_first_and_jobs_without_one_are_left_out(monitors: Monitors, scene: Scene) -> None:
    await store_models(scene)
    monitor = await monitors.start()
    listed = (await monitor.get("/v1/models", ModelList)).models
    assert [model.job for model in listed] == ["job-2", "job-1"]
    assert listed[1].params_sha256 == "01" * 32
    assert (listed[1].name, listed[1].args, listed[1].completed) == ("first", ("--lr", "0.1"), at(100.0))
    assert listed[1].validation == COMPLETED.validation


@needs_browser
async def test_the_page_lists_models_compares_those_that_are_chosen_and_links_their_files(
    monitors: Monitors, scene: Scene
) -> None:
    await store_models(scene)
    monitor = await monitors.start()
    async with browsing() as browser, tab(browser) as seen:
        await seen.open(monitor.url, token=TOKEN)
        page = seen.page
        await page.click("nav >> text=Models")
        await expect(page.locator("tbody tr")).to_have_count(2)
        await expect(page.locator("tbody tr").first).to_contain_text(HOSTILE)
        download = page.get_by_label("Download the model of job-1")
        assert await download.get_attribute("href") == "/v1/jobs/job-1/model"
        assert await serious_faults(page) == []
        for name in ("job-1", "job-2"):
            await page.get_by_label(f"Compare {name}").check()
        beside = page.get_by_label("Chosen models side by side")
        for text in ("first (job-1)", "0.25", "0.5", "train.py --lr 0.1", "01" * 32, "02" * 32):
            await expect(beside).to_contain_text(text)
        assert await serious_faults(page) == []
        await page.get_by_label("Compare job-1").uncheck()
        await expect(beside.locator("table")).to_have_count(0)
