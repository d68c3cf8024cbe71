"""What a monitor shows, asked of the real one."""

import asyncio
from datetime import UTC, datetime

from resile_monitor.api.pool import MAX_HISTORY
from resile_shared.bus import subjects
from resile_shared.bus.client import Bus
from resile_shared.bus.subjects import DEAD_LETTERS
from resile_shared.http.api import HistoryPage, HostList, JobList, JobView, LedgerView
from resile_shared.messages.commands import ExplainJobs, JobExplanations
from resile_shared.messages.deadletters import DeadLetter
from resile_shared.messages.jobs import JobEvent, JobState
from resile_shared.messages.message import at
from resile_shared.messages.reports import Content, Failed, Warned
from resile_testing.fixtures import Pool
from resile_testing.waiting import PATIENCE_SECONDS

from .examples import COMPLETED, beat, host, item, job, progress, report, with_history, worker
from .monitors import Monitor, Monitors, Scene


async def tell(learner: Bus, content: Content, *, generation: int = 1, name: str = "job-1") -> None:
    told = report(content, generation=generation, name=name)
    await learner.publish(subjects.report(name, content.kind), told)


async def shows(monitor: Monitor, job: str, **wanted: object) -> JobView:
    """Wait until the monitor shows the job so."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            view = await monitor.get(f"/v1/jobs/{job}", JobView)
            if all(getattr(view, name) == value for name, value in wanted.items()):
                return view
            await asyncio.sleep(0.02)


async def test_jobs_are_shown_as_they_change(monitors: Monitors, scene: Scene) -> None:
    await scene.store_job(job())
    await tell(scene.learner, progress(5))
    monitor = await monitors.start()
    await shows(monitor, "job-1", iteration=5)
    await tell(scene.learner, progress(6))
    await shows(monitor, "job-1", iteration=6)
    await tell(scene.learner, Warned(message="careful"))
    await scene.store_job(job(priority=9000))
    await scene.store_job(job("job-2", state=JobState.ACCEPTED, submitted=at(9.0)))
    await shows(monitor, "job-1", priority=9000, warnings=("careful",))
    await shows(monitor, "job-2", state=JobState.ACCEPTED)
    assert [summary.id for summary in (await monitor.get("/v1/jobs", JobList)).jobs] == ["job-1", "job-2"]
    assert (await monitor.get("/v1/jobs/job-1/ledger", LedgerView)).epochs == ()
    await scene.store_job(job(state=JobState.COMPLETED, completed=COMPLETED))
    await shows(monitor, "job-1", params_sha256=COMPLETED.params_sha256)
    assert (await monitor.get("/v1/jobs/job-1/ledger", LedgerView)).epochs == COMPLETED.ledger


async def test_the_reason_of_an_active_job_is_that_of_the_newest_decision(monitors: Monitors, scene: Scene) -> None:
    """Without a scheduler that replies it is that of the history."""
    await scene.store_job(job())
    await scene.store_job(job("job-2", state=JobState.COMPLETED, completed=COMPLETED))
    monitor = await monitors.start()
    await shows(monitor, "job-1", reason="fair share with job-2")

    async def explain(_: object) -> JobExplanations:
        return JobExplanations(reasons={"job-1": "all it can use", "job-2": "all it can use"})

    await scene.scheduler.serve(subjects.EXPLAIN_JOBS, ExplainJobs, explain)
    await shows(monitor, "job-1", reason="all it can use")
    reasons = [view.reason for view in (await monitor.get("/v1/jobs", JobList)).jobs]
    assert reasons == ["all it can use", "fair share with job-2"], "a job that is over shares nothing"


async def test_a_scheduler_that_does_not_reply_holds_up_no_answer(monitors: Monitors, scene: Scene) -> None:
    await scene.store_job(job())
    monitor = await monitors.start()
    asked = asyncio.Event()

    async def explain(_: object) -> JobExplanations:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    await scene.scheduler.serve(subjects.EXPLAIN_JOBS, ExplainJobs, explain)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not asked.is_set():  # the subscription may reach the server after the first request
            view = await monitor.get("/v1/jobs/job-1", JobView)
            assert view.reason == "fair share with job-2"


async def test_hosts_are_shown_with_what_they_run(monitors: Monitors, scene: Scene) -> None:
    await scene.store_host(host())
    monitor = await monitors.start()
    shown = (await monitor.get("/v1/hosts", HostList)).hosts
    assert [(view.id, view.labels, len(view.slots)) for view in shown] == [("host-1", {"zone": "a"}, 2)]
    async with asyncio.timeout(PATIENCE_SECONDS):
        number = 0
        while (await monitor.get("/v1/hosts", HostList)).hosts[0].slots[1].job != "job-1":
            number += 1
            await scene.learner.send(subjects.heartbeat("host-1"), beat(worker(1), number=number))
            await asyncio.sleep(0.05)


async def test_two_monitors_and_one_that_starts_again_say_the_same(monitors: Monitors, scene: Scene) -> None:
    await scene.store_host(host())
    await scene.store_job(job("job-2", state=JobState.FAILED))
    await scene.store_job(job("job-3", state=JobState.COMPLETED, completed=COMPLETED))
    await scene.store_job(job())
    for iteration in range(1, 40):
        await tell(scene.learner, progress(iteration))
    await tell(scene.learner, Failed(message="broken", details="Traceback"), name="job-2")
    await tell(scene.learner, Warned(message="a"))
    await tell(scene.learner, Warned(message="b"))
    first, second = await monitors.start(), await monitors.start()
    await first.kill()
    again = await monitors.start()
    for path in ("/v1/jobs", "/v1/jobs/job-1", "/v1/jobs/job-2", "/v1/jobs/job-3", "/v1/hosts", "/v1/events?job=job-1"):
        async with second.http.get(path) as one, again.http.get(path) as other:
            assert (one.status, await one.read()) == (200, await other.read())
    view = await again.get("/v1/jobs/job-1", JobView)
    assert (view.iteration, view.warnings) == (39, ("a", "b"))


async def test_what_cannot_be_read_is_put_aside_and_changes_nothing(
    monitors: Monitors, scene: Scene, pool: Pool
) -> None:
    await scene.store_job(job())
    monitor = await monitors.start()
    await tell(scene.learner, progress(3))
    connection = scene.learner.connection
    for subject in ("resile.report.job-1.progress", "resile.heartbeat.host-1"):
        await connection.send(subject, b"\xff no message", headers={})
    wrong = DeadLetter(subject="x", service="y", reason="z", time=datetime.now(UTC), body="")
    await scene.learner.publish("resile.report.job-1.failed", wrong)
    await scene.learner.publish("resile.report.job-1.progress", report(progress(4)))
    await shows(monitor, "job-1", iteration=4)
    subjects_buried: set[str] = set()
    reader = await pool.bus("monitor", service="reader")
    async with asyncio.timeout(PATIENCE_SECONDS):
        async for letter in reader.read_stream(DEAD_LETTERS, DeadLetter).follow(after=0):
            subjects_buried.add(letter.message.subject)
            if len(subjects_buried) == 3:
                break
    assert subjects_buried == {
        "resile.report.job-1.progress",
        "resile.report.job-1.failed",
        "resile.heartbeat.host-1",
    }


async def test_a_monitor_shows_what_it_knows_while_the_bus_is_away(
    monitors: Monitors, scene: Scene, pool: Pool
) -> None:
    await scene.store_job(job())
    monitor = await monitors.start()
    await pool.kill()
    assert (await monitor.get("/v1/jobs/job-1", JobView)).state is JobState.RUNNING
    problem = await monitor.problem("GET", "/v1/events")
    assert (problem.status, problem.code) == (503, "unavailable")
    await pool.server.start()
    await scene.store_job(job(priority=1))
    await shows(monitor, "job-1", priority=1)


async def test_a_long_history_is_shown_in_pages(monitors: Monitors, scene: Scene) -> None:
    num_items = MAX_HISTORY + 7
    items = [item(number, generation=number, iteration=number) for number in range(1, num_items + 1)]
    record = with_history(job(), *items).model_copy(update={"unpublished": tuple(items[-2:])})
    monitor = await monitors.start()
    for event in items[:-1]:  # one of those that the record still holds is published already
        await scene.scheduler.publish(
            subjects.job_event("job-1", event.kind),
            JobEvent(job="job-1", name="a", tenant="default", state=record.state, priority=1, item=event),
        )
    await scene.store_job(record)
    view = await monitor.get("/v1/jobs/job-1", JobView)
    assert view.history_length == num_items
    assert view.history == tuple(items[7:])
    page = await monitor.get(f"/v1/jobs/job-1/history?before={view.history[0].number}", HistoryPage)
    assert page.items == tuple(items[:7])
    assert (await monitor.get("/v1/jobs/job-1/history?before=1", HistoryPage)).items == ()
