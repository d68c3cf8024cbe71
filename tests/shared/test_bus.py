import asyncio
import logging
import re
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
from opentelemetry import trace

from resile_shared.bus import subjects
from resile_shared.bus.catalogue import model_of
from resile_shared.bus.client import Bus
from resile_shared.bus.connection import Connection, NatsClient
from resile_shared.bus.credentials import Credentials
from resile_shared.bus.envelope import Received, encode, headers_for
from resile_shared.bus.subjects import DEAD_LETTERS, EVENTS, HELLOS, LOGS, REPORTS
from resile_shared.messages.commands import Accepted, JobStop, JobSubmit, Refused
from resile_shared.messages.deadletters import DeadLetter
from resile_shared.messages.hosts import Heartbeat, HostHello
from resile_shared.messages.instructions import Instruction, SendHeartbeat
from resile_shared.telemetry.traces import set_up_tracing, traced
from resile_testing.fixtures import Pool
from resile_testing.waiting import PATIENCE_SECONDS, until

from .examples import hello

HELLO = subjects.host_event("host-1", "hello")
STOP = subjects.command("job", "stop")


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def dead_letters(bus: Bus, num: int) -> list[DeadLetter]:
    letters: list[DeadLetter] = []

    async def read(received: Received[DeadLetter]) -> None:
        letters.append(received.message)

    async with running(bus.follow(DEAD_LETTERS, DeadLetter, read)):
        await until(lambda: len(letters) >= num)
    return letters


async def test_an_event_reaches_followers_of_now_and_later_in_order(pool: Pool) -> None:
    registry = await pool.bus("registry")
    learner = await pool.bus("learner")
    early: list[Received[HostHello]] = []
    late: list[int] = []

    async def read_early(received: Received[HostHello]) -> None:
        early.append(received)

    async def read_late(received: Received[HostHello]) -> None:
        late.append(received.message.incarnation)

    async with running(registry.follow(EVENTS, HostHello, read_early, subjects=(HELLOS,))):
        for incarnation in range(1, 31):
            await learner.publish(HELLO, hello(incarnation))
        async with running(registry.follow(EVENTS, HostHello, read_late, subjects=(HELLOS,), after=20)):
            await until(lambda: len(early) == 30 and len(late) == 10)
    assert [received.message.incarnation for received in early] == list(range(1, 31))
    assert late == list(range(21, 31))
    assert (early[0].source, early[0].subject, early[0].sequence) == ("learner", HELLO, 1)


async def test_a_follower_of_the_new_sees_nothing_old(pool: Pool) -> None:
    registry = await pool.bus("registry")
    learner = await pool.bus("learner")
    seen: list[int] = []

    async def read(received: Received[HostHello]) -> None:
        seen.append(received.message.incarnation)

    await learner.publish(HELLO, hello(1))
    async with running(registry.follow(EVENTS, HostHello, read, subjects=(HELLOS,), start="new")):
        async with asyncio.timeout(PATIENCE_SECONDS):
            for incarnation in count(2):  # what is sent before the follower's consumer exists is old as well
                await learner.publish(HELLO, hello(incarnation))
                await asyncio.sleep(0.05)
                if seen:
                    break
    assert 1 not in seen


async def test_the_same_message_id_has_its_effect_once(pool: Pool) -> None:
    registry = await pool.bus("registry")
    learner = await pool.bus("learner")
    seen: list[int] = []
    beats: list[int] = []

    async def read(received: Received[HostHello]) -> None:
        seen.append(received.message.incarnation)

    async def beat(received: Received[Heartbeat]) -> None:
        beats.append(received.message.number)

    await registry.subscribe(subjects.HEARTBEATS, Heartbeat, beat)
    await registry.connection.flush()
    async with running(registry.follow(EVENTS, HostHello, read, subjects=(HELLOS,))):
        for incarnation in (1, 2, 3):
            await learner.publish(HELLO, hello(incarnation), message_id="one")
        await learner.publish(HELLO, hello(4), message_id="two")
        once = Heartbeat(host="host-1", incarnation=1, number=1)
        headers = headers_for(once, source="test")
        for _ in range(3):
            await learner.connection.send(subjects.heartbeat("host-1"), encode(once), headers=headers)
        await learner.send(subjects.heartbeat("host-1"), once.model_copy(update={"number": 2}))
        await until(lambda: len(seen) >= 2 and len(beats) >= 2)
    assert seen == [1, 4]
    assert beats == [1, 2]


async def test_a_repeated_request_gets_its_first_answer(pool: Pool) -> None:
    scheduler = await pool.bus("scheduler")
    registry = await pool.bus("registry")
    publisher = await pool.bus("publisher")
    calls: list[str] = []

    async def stop(received: Received[JobStop]) -> Accepted:
        calls.append(received.id)
        return Accepted(job_id=f"answer-{len(calls)}")

    await scheduler.answer(STOP, JobStop, stop)
    first = await publisher.ask(STOP, JobStop(job_id="job-1"), message_id="one")
    again = await publisher.ask(STOP, JobStop(job_id="job-1"), message_id="one")
    assert first == again == Accepted(job_id="answer-1")
    assert calls == ["one"]
    assert registry.is_up


async def test_a_request_waits_for_its_service(pool: Pool) -> None:
    await pool.bus("registry")
    scheduler = await pool.bus("scheduler")
    publisher = await pool.bus("publisher")

    async def stop(received: Received[JobStop]) -> Refused:
        return Refused(code="unknown", reason=f"there is no job {received.message.job_id}")

    asking = asyncio.create_task(publisher.ask(STOP, JobStop(job_id="job-9")))
    await asyncio.sleep(0.2)
    assert not asking.done()
    await scheduler.answer(STOP, JobStop, stop)
    assert await asking == Refused(code="unknown", reason="there is no job job-9")


async def test_a_reply_that_comes_after_a_restart_of_the_server_is_no_error(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """The server allows a reply for the request that it knows; the request is sent again, and answered."""
    caplog.set_level(logging.INFO)
    scheduler, monitor = await pool.bus("scheduler"), await pool.bus("monitor")
    begun, is_back = asyncio.Event(), asyncio.Event()

    async def answer(_: Received[JobStop]) -> Accepted:
        begun.set()
        await is_back.wait()
        return Accepted()

    await scheduler.answer(STOP, JobStop, answer)
    asked = asyncio.ensure_future(monitor.ask(STOP, JobStop(job_id="job-1")))
    await begun.wait()
    await pool.crash()
    await until(lambda: scheduler.connection.is_up and "NATS reconnected" in caplog.text)
    is_back.set()
    assert await asked == Accepted()
    await until(lambda: "late reply dropped" in caplog.text)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert not scheduler.connection.denied


async def test_a_malformed_request_is_answered_with_the_reason(pool: Pool) -> None:
    scheduler = await pool.bus("scheduler")
    await pool.bus("registry")
    monitor = await pool.bus("monitor")

    async def submit(received: Received[JobSubmit]) -> Accepted:
        raise AssertionError("not reached")

    await scheduler.answer(subjects.command("job", "submit"), JobSubmit, submit)
    headers = headers_for(hello(), source="test")
    for spoiled, body, reason in (
        ({}, b"{}", "ce-specversion"),
        ({"ce-id": ""}, b"{}", "ce-id"),
        ({"ce-type": "other"}, b"{}", "must be resile.JobSubmit"),
        ({"ce-type": "resile.JobSubmit"}, b"\xff\x00", "Invalid JSON"),
        (
            {"ce-type": "resile.JobSubmit"},
            b'{"spec": {"name": "", "wrong": 1}}',
            "spec.name must .*wrong is unknown",
        ),
    ):
        sent = headers | spoiled if spoiled else {"none": "of ours"}
        reply = await monitor.connection.request("resile.command.job.submit", body, headers=sent)
        refused = Refused.model_validate_json(reply.data)
        assert refused.code == "malformed"
        assert re.search(reason, refused.reason)
    letters = await dead_letters(monitor, 5)
    assert {(letter.subject, letter.service) for letter in letters} == {("resile.command.job.submit", "scheduler")}


async def test_a_message_whose_handler_fails_goes_to_the_dead_letters_and_stops_nobody(pool: Pool) -> None:
    registry = await pool.bus("registry")
    await pool.bus("scheduler")
    learner = await pool.bus("learner")
    monitor = await pool.bus("monitor")
    tries: list[int] = []

    async def read(received: Received[HostHello]) -> None:
        tries.append(received.message.incarnation)
        if received.message.incarnation == 1:
            raise RuntimeError("cannot digest it")

    async with running(registry.follow(EVENTS, HostHello, read, subjects=(HELLOS,))):
        await learner.publish(HELLO, hello(1))
        await learner.publish(HELLO, hello(2))
        (letter,) = await dead_letters(monitor, 1)
        await until(lambda: len(tries) == 2)
    assert tries == [1, 2]
    assert letter.reason == "registry failed to handle it: RuntimeError: cannot digest it"


async def test_what_could_not_be_handled_has_its_effect_when_it_is_sent_again(pool: Pool) -> None:
    registry, learner = await pool.bus("registry"), await pool.bus("learner")
    scheduler, publisher = await pool.bus("scheduler"), await pool.bus("publisher")
    calls: list[str] = []

    def fail_first(message_id: str) -> None:
        calls.append(message_id)
        if calls.count(message_id) == 1:
            raise RuntimeError("not now")

    async def beat(received: Received[Heartbeat]) -> None:
        fail_first(received.id)

    async def stop(received: Received[JobStop]) -> Accepted:
        fail_first(received.id)
        return Accepted()

    await registry.subscribe(subjects.HEARTBEATS, Heartbeat, beat)
    await scheduler.answer(STOP, JobStop, stop)
    await registry.connection.flush()
    once = Heartbeat(host="host-1", incarnation=1, number=1)
    for message_id in ("beat", "beat", "beat", "last"):
        headers = headers_for(once, source="test", message_id=message_id)
        await learner.connection.send(subjects.heartbeat("host-1"), encode(once), headers=headers)
    answers = [await publisher.ask(STOP, JobStop(job_id="job-1"), message_id="stop") for _ in range(3)]
    await until(lambda: "last" in calls)
    assert [type(answer) for answer in answers] == [Refused, Accepted, Accepted]
    assert sorted(calls) == ["beat", "beat", "last", "stop", "stop"]


GARBAGE: tuple[tuple[dict[str, str], bytes], ...] = (
    ({}, b""),
    ({"a": "b"}, b"\x00\xff\xfe"),
    ({"ce-specversion": "1.0", "ce-id": "1", "ce-source": "s", "ce-type": "resile.HostHello"}, b"[1, 2"),
    ({"ce-specversion": "1.0", "ce-id": "2", "ce-source": "s", "ce-type": "\x07"}, b"null"),
)


async def test_garbage_on_every_subject_stops_nobody(pool: Pool) -> None:
    registry = await pool.bus("registry")
    scheduler = await pool.bus("scheduler")
    learner = await pool.bus("learner")
    monitor = await pool.bus("monitor")
    seen: list[str] = []

    async def note(received: Received[Any]) -> None:
        seen.append(received.subject)

    async def stop(received: Received[JobStop]) -> Accepted:
        return Accepted()

    await scheduler.answer(STOP, JobStop, stop)
    await registry.subscribe(subjects.HEARTBEATS, Heartbeat, note)
    async with (
        running(registry.follow(EVENTS, model_of, note)),
        running(scheduler.follow(REPORTS, model_of, note)),
        running(monitor.follow(EVENTS, model_of, note)),
        running(monitor.follow(LOGS, model_of, note)),
        running(monitor.follow(DEAD_LETTERS, model_of, note)),
    ):
        for headers, body in GARBAGE:
            for subject in ("host.h.hello", "host.h.goodbye", "heartbeat.h", "report.j.progress", "log.j"):
                await learner.connection.send(f"resile.{subject}", body, headers=headers)
            for subject in ("host.h.joined", "host.h.left", "deadletter"):
                await registry.connection.send(f"resile.{subject}", body, headers=headers)
            await scheduler.connection.send("resile.job.j.running", body, headers=headers)
            await monitor.connection.request(STOP, body, headers=headers)
        await learner.publish(HELLO, hello())
        await learner.send(subjects.heartbeat("host-1"), Heartbeat(host="host-1", incarnation=1, number=0))
        await until(lambda: seen.count(HELLO) == 2 and "resile.heartbeat.host-1" in seen)
    assert isinstance(await monitor.ask(STOP, JobStop(job_id="job-1")), Accepted)


async def test_a_trace_goes_on_in_the_handler(pool: Pool) -> None:
    set_up_tracing("test")
    registry = await pool.bus("registry")
    learner = await pool.bus("learner")
    seen: list[int] = []

    async def read(received: Received[HostHello]) -> None:
        seen.append(trace.get_current_span().get_span_context().trace_id)

    async with running(registry.follow(EVENTS, HostHello, read, subjects=(HELLOS,))):
        with traced("start") as span:
            await learner.publish(HELLO, hello())
        await until(lambda: seen)
    assert seen == [span.get_span_context().trace_id]


async def test_what_is_only_sent_is_dropped_and_counted_while_the_bus_is_away(pool: Pool) -> None:
    registry = await pool.bus("registry")
    await pool.bus("scheduler")
    await pool.kill()
    await until(lambda: not registry.is_up)
    assert not await registry.send(subjects.host_event("host-1", "joined"), hello())
    assert registry.num_not_sent == 1
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await registry.publish(subjects.host_event("host-1", "joined"), hello())
    await pool.server.start()
    await until(lambda: registry.is_up)


async def test_a_request_that_is_cancelled_as_its_answer_comes_is_cancelled(pool: Pool) -> None:
    bus = await pool.bus("scheduler")
    under_way = bus.connection._client._resp_map
    asking = asyncio.create_task(bus.round_trip())
    while not under_way:  # noqa: ASYNC110 - before the answer can come
        await asyncio.sleep(0)
    (answer,) = under_way.values()
    was_cancelled: list[bool] = []  # newer versions of Python have returned the answer by then
    answer.add_done_callback(lambda _: was_cancelled.append(asking.cancel()))
    await asyncio.wait({asking})
    assert [asking.cancelled()] == was_cancelled


async def test_connecting_is_given_up_also_if_a_cancellation_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    num_dropped = 0

    async def connect(*args: object, **options: object) -> None:
        nonlocal num_dropped
        while num_dropped < 3:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                num_dropped += 1
        await asyncio.sleep(60)

    monkeypatch.setattr(NatsClient, "connect", connect)
    opening = asyncio.create_task(Connection.open(Credentials(url="nats://none", user="u", password="p"), name="n"))
    await asyncio.sleep(0.01)
    opening.cancel()
    await asyncio.wait({opening})
    assert opening.cancelled()
    assert num_dropped == 3
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_what_was_sent_before_a_flush_reaches_the_server_before_it(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, learner = await pool.bus("scheduler"), await pool.bus("learner")
    transport = learner.connection._client._transport
    assert transport is not None
    write, write_lines = transport.write, transport.writelines
    sent: list[bytes] = []
    monkeypatch.setattr(transport, "write", lambda data: (sent.append(data), write(data)))
    monkeypatch.setattr(transport, "writelines", lambda lines: (sent.extend(lines), write_lines(lines)))

    async def ignore(_: Received[Instruction]) -> None:
        pass

    await learner.subscribe(subjects.instruction("host-1"), Instruction, ignore)
    await learner.connection.flush()
    stream = b"".join(sent)
    assert 0 <= stream.find(b"SUB resile.instruction.host-1") < stream.find(b"PING")


async def test_it_is_known_at_once_that_nobody_listens(pool: Pool) -> None:
    scheduler, learner = await pool.bus("scheduler"), await pool.bus("learner")
    subject, question = subjects.instruction("host-1"), Instruction(SendHeartbeat(incarnation=1))
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert not await scheduler.send_to_listener(subject, question, seconds=60)
    heard: list[Instruction] = []

    async def listen(received: Received[Instruction]) -> None:
        heard.append(received.message)

    listening = await learner.subscribe(subject, Instruction, listen)
    await learner.connection.flush()
    assert await scheduler.send_to_listener(subject, question, seconds=0.2)
    await until(lambda: heard == [question])
    await listening.unsubscribe()
    await learner.connection.flush()
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert not await scheduler.send_to_listener(subject, question, seconds=60)
