"""A replica computes no more requests at a time than it may, none that is too late, and answers all before it ends."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from resile_learner.worker.replica import Requests
from resile_shared.calls import IDEMPOTENT as MARK
from resile_shared.calls import CallHead, ReplicaHead, ReplyHead, frame, read_frame
from resile_testing.waiting import until

FOREVER = 3600.0


class Served:
    """Counts the calls that are computed at the same time."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.num_running = 0
        self.most_running = 0
        self._lock = threading.Lock()

    def hold(self) -> str:
        with self._lock:
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        self.may_end.wait(30)
        with self._lock:
            self.num_running -= 1
        return "held"

    def quick(self, x: int) -> int:
        return 2 * x

    def large(self) -> str:
        return "x" * 1_000_000

    def exit(self) -> None:
        raise SystemExit(3)

    def stop(self) -> None:
        next(iter(()))

    async def cancel(self) -> None:
        raise asyncio.CancelledError


setattr(Served.quick, MARK, True)


class Link:
    """The agent's end of the connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    def ask(self, number: int, method: str, body: bytes = b"", *, seconds: float = FOREVER) -> None:
        self.writer.write(frame(CallHead(number=number, method=method, seconds=seconds), body))

    async def reply(self) -> tuple[int, str, bytes]:
        found = await read_frame(self._reader)
        assert found is not None
        head = ReplyHead.model_validate_json(found[0])
        return head.number, head.status, found[1]

    async def end(self) -> bytes:
        return await self._reader.read()

    async def hello(self) -> ReplicaHead:
        found = await read_frame(self._reader)
        assert found is not None
        return ReplicaHead.model_validate_json(found[0])


@asynccontextmanager
async def linked(served: Served, *, concurrency: int) -> AsyncIterator[Link]:
    requests = Requests(served, concurrency=concurrency)
    async with await asyncio.start_server(requests.answer_all, "127.0.0.1", 0) as server:
        link = Link(*await asyncio.open_connection(*server.sockets[0].getsockname()))
        assert await link.hello() == ReplicaHead(idempotent=("quick",))
        yield link
        served.may_end.set()
        link.writer.close()


async def test_as_many_requests_are_computed_at_a_time_as_are_allowed() -> None:
    served = Served()
    async with linked(served, concurrency=2) as link:
        for number in range(5):
            link.ask(number, "hold")
        await until(lambda: served.num_running == 2)
        served.may_end.set()
        assert sorted([await link.reply() for _ in range(5)]) == [(number, "ok", b'"held"') for number in range(5)]
    assert served.most_running == 2


async def test_a_request_whose_time_is_over_is_not_computed() -> None:
    served = Served()
    async with linked(served, concurrency=1) as link:
        link.ask(1, "hold", seconds=0.0)
        assert (await link.reply())[:2] == (1, "late")
    assert served.most_running == 0


async def test_a_replica_that_is_asked_to_leave_answers_what_it_has() -> None:
    served = Served()
    async with linked(served, concurrency=1) as link:
        link.ask(1, "hold")
        link.ask(2, "quick", b"[4]")
        link.writer.write_eof()
        await until(lambda: served.num_running == 1)
        served.may_end.set()
        assert [await link.reply(), await link.reply()] == [(1, "ok", b'"held"'), (2, "ok", b"8")]


async def test_a_method_that_does_not_return_holds_up_no_replica_that_leaves() -> None:
    served = Served()
    async with linked(served, concurrency=1) as link:
        link.ask(1, "hold", seconds=0.3)
        await until(lambda: served.num_running == 1)
        link.writer.write_eof()
        assert await link.end() == b"", "it has not answered"


async def test_what_a_method_does_is_the_answer_and_never_the_end_of_the_replica() -> None:
    async with linked(Served(), concurrency=1) as link:
        for number, method in enumerate(("large", "exit", "absent", "stop", "cancel")):
            link.ask(number, method)
        replies = sorted([await link.reply() for _ in range(5)])
        assert [status for _, status, _ in replies] == ["too large", "failed", "unknown", "failed", "failed"]
        assert b"SystemExit: 3" in replies[1][2]
        link.ask(9, "quick", b'{"x": 21}')
        assert await link.reply() == (9, "ok", b"42")
