"""Webhooks on the real bus, with real monitors and a real receiver."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import orjson
import pytest
from aiohttp import web

from resile_monitor.webhooks.core import Pace, signature
from resile_monitor.webhooks.delivery import Deliveries
from resile_shared.bus import subjects
from resile_shared.bus.envelope import Received
from resile_shared.bus.stream_reader import StreamReader
from resile_shared.http.api import WebhookCreated, WebhookList, WebhookView
from resile_shared.messages.jobs import JobEvent, JobState
from resile_shared.messages.message import at
from resile_shared.messages.webhooks import MAX_WEBHOOKS, Webhook
from resile_testing.waiting import PATIENCE_SECONDS, until

from .examples import item
from .monitors import Monitor, Monitors, Scene

QUICK = ("--webhook-pause-seconds", "0.05", "--webhook-seconds", "60")


@dataclass
class Receiver:
    """What a server got, and how it answers: with the first status that is left, and then with 204; 0 hangs."""

    url: str = ""
    statuses: list[int] = field(default_factory=list)
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    num_elsewhere: int = 0
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self, request: web.Request) -> web.Response:
        self.got.append((dict(request.headers), await request.read()))
        status = self.statuses.pop(0) if self.statuses else 204
        if status == 0:
            await self.released.wait()
        headers = {"Location": self.url.replace("/hook", "/elsewhere")} if 300 <= status < 400 else {}
        return web.Response(status=status, headers=headers)

    async def elsewhere(self, _: web.Request) -> web.Response:
        self.num_elsewhere += 1
        return web.Response(status=204)

    @property
    def ids(self) -> list[str]:
        return [orjson.loads(body)["id"] for _, body in self.got]


@asynccontextmanager
async def receiving(*statuses: int) -> AsyncIterator[Receiver]:
    receiver = Receiver(statuses=list(statuses))
    served = web.Application()
    served.add_routes([web.post("/hook", receiver.take), web.route("*", "/elsewhere", receiver.elsewhere)])
    runner = web.AppRunner(served, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    try:
        yield receiver
    finally:
        receiver.released.set()
        await runner.cleanup()


async def end(scene: Scene, number: int, *, kind: str = "completed") -> None:
    """A job ends, with its history item ``number``."""
    event = JobEvent(
        job="job-1",
        name="digits",
        tenant="default",
        state=JobState(kind),
        priority=5000,
        item=item(number, generation=1, iteration=number, kind=kind),
    )
    await scene.scheduler.publish(subjects.job_event("job-1", kind), event)


async def add(monitor: Monitor, receiver: Receiver, **fields: object) -> WebhookCreated:
    status, made = await monitor.post("/v1/webhooks", {"url": receiver.url, **fields})
    assert status == 201
    return WebhookCreated.model_validate(made)


async def view(monitor: Monitor) -> WebhookView:
    return (await monitor.get("/v1/webhooks", WebhookList)).webhooks[0]


async def becomes_delivered(monitor: Monitor, num: int) -> WebhookView:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (seen := await view(monitor)).num_delivered < num:  # noqa: ASYNC110 - another process counts
            await asyncio.sleep(0.05)
    return seen


async def test_the_end_of_a_job_is_delivered_signed_once_by_several_monitors(monitors: Monitors, scene: Scene) -> None:
    running = [await monitors.start(*QUICK) for _ in range(3)]
    async with receiving() as receiver:
        await end(scene, 1)
        made = await add(running[0], receiver)
        for number in range(2, 7):
            await end(scene, number, kind="failed" if number % 2 else "completed")
        await end(scene, 7, kind="stopped")
        await end(scene, 8)
        seen = await becomes_delivered(running[1], 6)
    assert receiver.ids == ["job-1-2", "job-1-3", "job-1-4", "job-1-5", "job-1-6", "job-1-8"]
    headers, body = receiver.got[0]
    expected = signature(made.secret, id_="job-1-2", sent=headers["webhook-timestamp"], body=body)
    assert headers["webhook-signature"] == expected
    assert orjson.loads(body)["data"]["state"] == "completed"
    assert (seen.num_given_up, seen.last_error, seen.attempts) == (0, "", 0)
    assert "secret" not in seen.model_dump()


async def test_an_event_that_is_stored_while_other_kinds_are_read_is_not_skipped(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kinds are read one after the other: job-1 completes after the first was read, and fails before the second."""
    bus = scene.scheduler
    first_after = StreamReader.first_after
    num_reads = 0

    async def end_meanwhile(reader: StreamReader[JobEvent], sequence: int) -> Received[JobEvent] | None:
        nonlocal num_reads
        num_reads += 1
        found = await first_after(reader, sequence)
        if num_reads == 1:
            await end(scene, 1)
            await end(scene, 2, kind="failed")
        return found

    monkeypatch.setattr(StreamReader, "first_after", end_meanwhile)
    deliveries = Deliveries(bus, Pace(attempt_seconds=60, first_pause_seconds=0.05))
    secret = "whsec_" + base64.b64encode(bytes(24)).decode()
    kinds = ("completed", "failed")
    webhook = Webhook(id="hook-1", url="http://127.0.0.1:1", secret=secret, events=kinds, created=at(1.0), after=0)
    event = await deliveries._next(webhook)
    assert event is not None
    assert event.message.item.number == 1


async def test_an_attempt_that_fails_is_repeated_with_the_same_id_and_no_redirect_is_followed(
    monitors: Monitors, scene: Scene
) -> None:
    monitor = await monitors.start(*QUICK)
    async with receiving(500, 302, 404) as receiver:
        await add(monitor, receiver)
        await end(scene, 1)
        await end(scene, 2)
        await becomes_delivered(monitor, 2)
    assert receiver.ids == ["job-1-1"] * 4 + ["job-1-2"]
    assert receiver.num_elsewhere == 0


async def test_a_receiver_that_hangs_stalls_neither_the_monitor_nor_other_receivers(
    monitors: Monitors, scene: Scene
) -> None:
    monitor = await monitors.start("--webhook-seconds", "60")
    async with receiving(*(12 * [0])) as hanging, receiving() as other:
        await add(monitor, hanging)
        await add(monitor, other)
        await end(scene, 1)
        await until(lambda: hanging.got and other.got)
        await monitor.answers("/readyz", 200)
        hung = await view(monitor)
        assert (hung.url, hung.num_delivered) == (hanging.url, 0)
        assert hung.attempts > 0


async def test_another_monitor_delivers_what_one_that_was_killed_had_claimed(monitors: Monitors, scene: Scene) -> None:
    first = await monitors.start("--webhook-seconds", "2")
    async with receiving(0) as receiver:
        await add(first, receiver)
        await end(scene, 1)
        await until(lambda: receiver.got)
        await first.kill()
        second = await monitors.start("--webhook-seconds", "2")
        await becomes_delivered(second, 1)
    assert set(receiver.ids) == {"job-1-1"}


async def test_what_ended_while_no_monitor_ran_is_delivered_later(monitors: Monitors, scene: Scene) -> None:
    first = await monitors.start(*QUICK)
    async with receiving() as receiver:
        await add(first, receiver)
        await first.kill()
        await end(scene, 1)
        await becomes_delivered(await monitors.start(*QUICK), 1)
        assert receiver.ids == ["job-1-1"]


async def test_removing_a_webhook_again_with_the_same_key_has_the_same_answer(monitors: Monitors, scene: Scene) -> None:
    monitor, other = await monitors.start(), await monitors.start()
    keyed = {"Idempotency-Key": "one"}
    _, made = await monitor.post("/v1/webhooks", {"url": "http://127.0.0.1:1/"})
    path = f"/v1/webhooks/{made['id']}"
    for each in (monitor, other):
        async with each.http.delete(path, headers=keyed) as answer:
            assert (answer.status, await answer.json()) == (200, {})
    for headers in ({}, {"Idempotency-Key": "two"}):
        assert (await other.problem("DELETE", path, headers=headers)).status == 404
    assert (await other.problem("DELETE", "/v1/webhooks/hook-2", headers=keyed)).status == 404


async def test_webhooks_are_listed_limited_and_removed(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start(*QUICK)
    async with receiving() as receiver:
        keyed = {"Idempotency-Key": "one"}
        made = [await monitor.post("/v1/webhooks", {"url": receiver.url}, headers=keyed) for _ in range(2)]
        assert made[0] == made[1], "the same request has its effect once"
        again = await monitor.problem("POST", "/v1/webhooks", json={"url": "http://other/"}, headers=keyed)
        assert again.code == "conflict"
        for _ in range(MAX_WEBHOOKS - 1):
            await add(monitor, receiver)
        full = await monitor.problem("POST", "/v1/webhooks", json={"url": receiver.url})
        assert (full.status, full.detail) == (409, f"there are {MAX_WEBHOOKS} webhooks already: remove one first")
        present = (await monitor.get("/v1/webhooks", WebhookList)).webhooks
        assert present[0].id == made[0][1]["id"]
        for webhook in present:
            async with monitor.http.delete(f"/v1/webhooks/{webhook.id}") as answer:
                assert answer.status == 200
        assert (await monitor.get("/v1/webhooks", WebhookList)).webhooks == ()
        await end(scene, 1)
        gone = await monitor.problem("DELETE", f"/v1/webhooks/{present[0].id}")
        assert gone.code == "unknown"
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await until(lambda: bool(receiver.got))
        assert receiver.got == []
    for body in ({}, {"url": "file:///etc/passwd"}, {"url": "http://h/", "events": []}, {"url": "http://h/", "x": 1}):
        assert (await monitor.problem("POST", "/v1/webhooks", json=body)).code == "invalid"
