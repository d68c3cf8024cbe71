"""Event streams: no gap and nothing twice, through restarts of the monitor and with slow readers."""

import asyncio
from contextlib import aclosing
from pathlib import Path

from resile_monitor.api.reading import MAX_TAIL_BYTES
from resile_shared.bus import subjects
from resile_shared.http.api import EventList, EventView, LogEntry, LogList
from resile_shared.messages.hosts import HostLost
from resile_shared.messages.jobs import JobEvent, JobRecord, JobState
from resile_shared.messages.logs import LogLine, LogLines
from resile_shared.messages.message import at
from resile_testing.fixtures import Pool
from resile_testing.waiting import PATIENCE_SECONDS, until

from .examples import item, job, progress, report
from .monitors import Event, Monitor, Monitors, Scene


async def announce(scene: Scene, number: int, *, name: str = "job-1") -> None:
    record: JobRecord = job(name)
    event = JobEvent(
        job=name,
        name=record.spec.name,
        tenant="default",
        state=record.state,
        priority=5000,
        item=item(number, generation=number, iteration=number),
    )
    await scene.scheduler.publish(subjects.job_event(name, "allocation"), event)


async def tell(scene: Scene, iteration: int, *, name: str = "job-1") -> None:
    await scene.learner.publish(subjects.report(name, "progress"), report(progress(iteration), name=name))


async def say(scene: Scene, *texts: str, dropped: int = 0, name: str = "job-1") -> None:
    lines = tuple(LogLine(time=at(1.0), stream="stdout", text=text) for text in texts)
    said = LogLines(job=name, host="host-1", incarnation=1, worker=0, lines=lines, dropped=dropped)
    await scene.learner.publish(subjects.log(name), said)


async def take(monitor: Monitor, path: str, num: int, *, last: str | None = None) -> list[Event]:
    taken: list[Event] = []
    async with asyncio.timeout(PATIENCE_SECONDS), aclosing(monitor.events(path, last=last)) as events:
        async for event in events:
            taken.append(event)
            if len(taken) == num:
                break
    return taken


def numbers(events: list[Event]) -> list[int]:
    return [event.data["data"]["item"]["number"] for event in events]


async def test_a_follower_sees_the_newest_events_and_all_that_come(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    for number in range(1, 6):
        await announce(scene, number)
    taking = asyncio.create_task(take(monitor, "/v1/events?follow=1&tail=2", 4))
    for number in range(6, 200):
        await announce(scene, number)
        if taking.done():
            break
        await asyncio.sleep(0.01)
    first, *rest = numbers(await taking)
    assert rest == [first + 1, first + 2, first + 3]
    for event in taking.result():
        EventView.model_validate(event.data)


async def test_a_follower_that_comes_back_misses_nothing_and_sees_nothing_twice(
    monitors: Monitors, scene: Scene, pool: Pool
) -> None:
    monitor = await monitors.start()
    for number in range(1, 11):
        await announce(scene, number)
    seen = await take(monitor, "/v1/events?follow=1&tail=10", 4)
    await monitor.kill()
    for number in range(11, 16):
        await announce(scene, number)
    await pool.crash()
    again = await monitors.start()
    seen += await take(again, "/v1/events?follow=1&tail=10", 11, last=seen[-1].id)
    assert numbers(seen) == list(range(1, 16))
    assert seen[-1].id == "events:15"


async def test_a_log_ends_when_its_job_is_over_and_nobody_need_come_back(monitors: Monitors, scene: Scene) -> None:
    await scene.store_job(job())
    monitor = await monitors.start()
    path = "/v1/jobs/job-1/logs?follow=1"
    await say(scene, "one", "two")
    seen: list[Event] = []

    async def read() -> None:
        async with aclosing(monitor.events(path)) as events:
            async for event in events:
                seen.append(event)  # noqa: PERF401 - it is looked at meanwhile

    async with asyncio.timeout(PATIENCE_SECONDS):
        reading = asyncio.create_task(read())
        await until(lambda: len(seen) == 2)
        await scene.store_job(job().model_copy(update={"state": JobState.COMPLETED}))
        await announce(scene, 1)
        await reading
    assert [event.data["text"] for event in seen] == ["one", "two"]
    async with monitor.http.get(path, headers={"Last-Event-ID": seen[-1].id}) as answer:
        assert answer.status == 204
    (rest,) = await take(monitor, path, 1, last=seen[0].id)
    assert rest.data["text"] == "two", "but what was not seen yet is told"


async def test_what_is_followed_of_a_job_ends_after_the_event_that_ends_it(monitors: Monitors, scene: Scene) -> None:
    """The end is stored in the record first, and published by the next scheduler if this one dies between."""
    await scene.store_job(job(state=JobState.STOPPED))
    await say(scene, "one")
    monitor = await monitors.start()
    path = "/v1/events?job=job-1&follow=1"
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        monitor.http.get(path, headers={"Last-Event-ID": "events:0,reports:0,progress:0"}) as events,
        monitor.http.get("/v1/jobs/job-1/logs?follow=1", headers={"Last-Event-ID": "logs:1"}) as lines,
    ):
        assert (events.status, lines.status) == (200, 200), "there is more to come"
        await announce(scene, 1)
        assert b'"number":1' in await events.content.read()
        await lines.content.read()
    last = {"Last-Event-ID": "events:1,reports:0,progress:0"}
    async with asyncio.timeout(PATIENCE_SECONDS), monitor.http.get(path, headers=last) as answer:
        assert answer.status == 204


async def test_what_is_followed_of_a_job_ends_although_its_events_are_gone(monitors: Monitors, scene: Scene) -> None:
    await scene.store_job(job(state=JobState.STOPPED, ended=at(2.0)))
    await announce(scene, 1, name="job-2")
    monitor = await monitors.start()
    async with asyncio.timeout(PATIENCE_SECONDS), monitor.http.get("/v1/events?job=job-1&follow=1") as answer:
        await answer.content.read()


async def test_what_precedes_a_message_that_cannot_be_read_is_sent(monitors: Monitors, scene: Scene) -> None:
    await scene.store_job(job(state=JobState.COMPLETED))
    await announce(scene, 1)
    await say(scene, "one")
    await scene.learner.connection.request_store(subjects.log("job-1"), b"no log")
    monitor = await monitors.start()
    (event,) = await take(monitor, "/v1/jobs/job-1/logs?follow=1", 1, last="logs:0")
    assert event.data["text"] == "one"
    async with monitor.http.get("/v1/jobs/job-1/logs?follow=1", headers={"Last-Event-ID": event.id}) as answer:
        assert answer.status == 204


async def test_a_log_ends_when_its_job_is_deleted(monitors: Monitors, scene: Scene) -> None:
    await scene.store_job(job())
    await say(scene, "one")
    monitor = await monitors.start()
    async with asyncio.timeout(PATIENCE_SECONDS), monitor.http.get("/v1/jobs/job-1/logs?follow=1") as answer:
        await answer.content.readuntil(b"data: ")
        await scene.store_job(job(state=JobState.COMPLETED, is_deleted=True))
        await answer.content.read()


async def test_who_comes_back_is_told_that_the_bus_is_away(monitors: Monitors, scene: Scene, pool: Pool) -> None:
    await scene.store_job(job(state=JobState.COMPLETED))
    monitor = await monitors.start()
    await pool.server.stop()
    async with asyncio.timeout(PATIENCE_SECONDS):
        problem = await monitor.problem("GET", "/v1/jobs/job-1/logs?follow=1", headers={"Last-Event-ID": "logs:0"})
    assert (problem.status, problem.detail) == (503, "the bus does not respond: try again")


async def test_a_place_before_the_first_message_is_the_begin(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    await announce(scene, 1)
    assert numbers(await take(monitor, "/v1/events?follow=1", 1, last="events:0.1")) == [1]


async def test_a_job_is_followed_in_two_streams_at_once(monitors: Monitors, scene: Scene) -> None:
    await scene.store_job(job())
    monitor = await monitors.start()
    for number in (1, 2, 3):
        await announce(scene, number)
        await announce(scene, number, name="job-2")
        await tell(scene, number)
        await tell(scene, number, name="job-2")
    path = "/v1/events?job=job-1"
    listed = (await monitor.get(path, EventList)).events
    assert [(event.stream, event.sequence) for event in listed] == [
        (stream, sequence) for sequence in (1, 3, 5) for stream in ("events", "progress")
    ]
    assert (await monitor.get(f"{path}&tail=3", EventList)).events == listed[3:]
    for num in range(1, 6):  # whenever it comes back, it sees the rest
        head = await take(monitor, f"{path}&follow=1&tail=6", num)
        rest = await take(monitor, f"{path}&follow=1", 6 - num, last=head[-1].id)
        assert sorted((e.data["stream"], e.data["sequence"]) for e in head + rest) == sorted(
            (event.stream, event.sequence) for event in listed
        )
    cut = await take(monitor, f"{path}&follow=1&tail=1", 1)
    await tell(scene, 4)
    late = await take(monitor, f"{path}&follow=1", 1, last=cut[-1].id)
    assert (late[0].data["stream"], late[0].data["sequence"]) == ("progress", 7)


async def test_one_stream_has_the_events_of_a_job_and_what_it_prints(monitors: Monitors, scene: Scene) -> None:
    await scene.store_job(job())
    monitor = await monitors.start()
    await announce(scene, 1)
    await say(scene, "one", "two", dropped=3)
    await say(scene, "of another", name="job-2")
    await tell(scene, 1)
    path = "/v1/events?job=job-1&logs=1"
    listed = (await monitor.get(path, EventList)).events
    streams = ["events", "logs", "logs", "logs", "progress"]
    assert sorted(event.stream for event in listed) == streams
    lines = (await monitor.get("/v1/jobs/job-1/logs", LogList)).lines
    assert [LogEntry.model_validate(event.data) for event in listed if event.stream == "logs"] == list(lines)
    for num in range(1, 5):  # also in the midst of a batch of lines
        head = await take(monitor, f"{path}&follow=1&tail=5", num)
        rest = await take(monitor, f"{path}&follow=1", 5 - num, last=head[-1].id)
        assert sorted(event.data["stream"] for event in head + rest) == streams
        texts = [event.data["data"]["text"] for event in head + rest if event.data["stream"] == "logs"]
        assert texts == [line.text for line in lines]
    problem = await monitor.problem("GET", "/v1/events?logs=1")
    assert (problem.status, problem.detail) == (422, "invalid query: logs=1 needs a job: add job=ID")


async def test_events_of_hosts_and_jobs_are_listed_from_the_newest_back(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    assert (await monitor.get("/v1/events", EventList)).events == ()
    for number in range(1, 300):
        await announce(scene, number, name="job-9")
    lost = HostLost(host="host-1", incarnation=1, time=at(5.0), reason="silent")
    await scene.registry.publish(subjects.host_event("host-1", "lost"), lost)
    await announce(scene, 1)
    newest = (await monitor.get("/v1/events?tail=2", EventList)).events
    assert [event.subject for event in newest] == ["resile.host.host-1.lost", "resile.job.job-1.allocation"]
    assert newest[0].data == lost.model_dump(mode="json")
    assert len((await monitor.get("/v1/events?tail=1000", EventList)).events) == 301
    assert len((await monitor.get("/v1/events", EventList)).events) == 100
    assert (await monitor.get("/v1/events?tail=0", EventList)).events == ()


async def test_logs_are_lines_whatever_batches_they_came_in(monitors: Monitors, scene: Scene) -> None:
    await scene.store_job(job())
    monitor = await monitors.start()
    path = "/v1/jobs/job-1/logs"
    assert (await monitor.get(path, LogList)).lines == ()
    await say(scene, "a", "b", "c")
    await say(scene, "other", name="job-2")
    await say(scene, "d", "e", dropped=7)
    lines = (await monitor.get(path, LogList)).lines
    note = "7 lines were dropped here: the buffer was full"
    assert [line.text for line in lines] == ["a", "b", "c", note, "d", "e"]
    assert (lines[0].host, lines[0].stream, lines[3].stream) == ("host-1", "stdout", "note")
    assert (await monitor.get(f"{path}?tail=2", LogList)).lines == lines[-2:]
    for num in range(1, 6):
        head = await take(monitor, f"{path}?follow=1&tail=6", num)
        rest = await take(monitor, f"{path}?follow=1", 6 - num, last=head[-1].id)
        assert [LogEntry.model_validate(event.data) for event in head + rest] == list(lines)
    assert [event.id for event in rest] == ["logs:3"]


async def test_an_answer_has_the_newest_lines_that_are_not_too_many_bytes(monitors: Monitors, scene: Scene) -> None:
    await scene.store_job(job())
    monitor = await monitors.start()
    await announce(scene, 1)
    for _ in range(12):
        await say(scene, *("x" * 50_000 for _ in range(20)))
    await announce(scene, 2)
    await say(scene, "last")
    lines = (await monitor.get("/v1/jobs/job-1/logs?tail=10000", LogList)).lines
    assert lines[-1].text == "last"
    assert MAX_TAIL_BYTES - 1_100_000 < sum(len(line.text) for line in lines) < MAX_TAIL_BYTES
    events = (await monitor.get("/v1/events?job=job-1&logs=1&tail=10000", EventList)).events
    assert [event.stream for event in events] == ["logs"] * (len(lines) - 1) + ["events", "logs"]


async def test_an_open_stream_ends_at_once_with_the_monitor(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    await announce(scene, 1)
    async with monitor.http.get("/v1/events?follow=1") as answer:
        await answer.content.readuntil(b"data: ")
        monitor.process.terminate()
        await answer.content.read()  # to its proper end: one that was cut off raises
    assert await monitor.process.wait() == 0


async def test_a_reader_that_stands_still_costs_little_and_others_nothing(monitors: Monitors, scene: Scene) -> None:
    await scene.store_job(job())
    monitor = await monitors.start()
    await say(scene, "first")
    async with monitor.http.get("/v1/jobs/job-1/logs?follow=1", read_bufsize=1 << 20) as slow:
        await slow.content.readuntil(b"data: ")
        before = _resident_bytes(monitor.process.pid)
        for _ in range(300):
            await say(scene, *("x" * 50_000 for _ in range(20)))
        await say(scene, "last")
        quick = await take(monitor, "/v1/jobs/job-1/logs?follow=1&tail=1", 1)
        assert quick[0].data["text"] == "last"
        # Of 300 MB: what the bus sends ahead, at most 32 MB, is there in more than one form.
        assert _resident_bytes(monitor.process.pid) - before < 100_000_000
        rest = b""
        while b'"last"' not in rest:
            rest = rest[-10:] + await slow.content.readany()


async def test_a_reader_that_goes_leaves_nothing_behind(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    await announce(scene, 1)
    files = Path(f"/proc/{monitor.process.pid}/fd")
    before = len(list(files.iterdir()))
    for _ in range(20):
        await take(monitor, "/v1/events?follow=1", 1)
    await until(lambda: len(list(files.iterdir())) <= before)


def _resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096
