"""The agent passes requests from the bus to its replicas: none is lost without an answer, whatever a replica does."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nats.aio.msg import Msg

from resile_learner.agent.events import MessageReceived, SendToWorker, WorkerExited
from resile_learner.agent.replicas import WAITING, HostReplicas
from resile_learner.messages import Member, Order, ReplicaConfig, WorkerListening
from resile_shared.bus import subjects
from resile_shared.bus.client import Bus
from resile_shared.calls import CallHead, ReplicaHead, ReplyHead, frame, read_frame
from resile_shared.messages.hosts import WorkerExit
from resile_shared.messages.services import Service
from resile_testing.fixtures import Pool
from resile_testing.waiting import until

CONFIG = ReplicaConfig(service=Service(class_name="Served"), secret="s" * 32)
ROOM = 1 + WAITING
FOREVER = 3600.0


class Replica:
    """The process of a replica: it keeps requests until it is told to answer one."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.requests: list[tuple[CallHead, bytes]] = []
        self.secret = b""
        self.has_ended = asyncio.Event()
        self.port = 0
        self._writer: asyncio.StreamWriter | None = None

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.secret = await reader.readexactly(len(CONFIG.secret))
        writer.write(frame(ReplicaHead(idempotent=("predict",)), b""))
        while (found := await read_frame(reader)) is not None:
            self.requests.append((CallHead.model_validate_json(found[0]), found[1]))
        self.has_ended.set()
        writer.close()

    def answer(self) -> None:
        head, body = self.requests.pop(0)
        self.write(frame(ReplyHead(number=head.number, status="ok"), body))

    def write(self, sent: bytes) -> None:
        assert self._writer is not None
        self._writer.write(sent)

    def die(self) -> None:
        assert self._writer is not None
        self._writer.close()


class House:
    """A host with its replicas, and the monitor that asks."""

    def __init__(self, learner: Bus, monitor: Bus) -> None:
        self.statuses = Counter[str]()
        self.replicas = HostReplicas(learner, lambda status: self.statuses.update([status]))
        self._learner = learner
        self._monitor = monitor
        self._generation = 0

    @asynccontextmanager
    async def replica(self, worker: int = 0) -> AsyncIterator[Replica]:
        replica = Replica(worker)
        server = await asyncio.start_server(replica.accept, "127.0.0.1", 0)
        replica.port = server.sockets[0].getsockname()[1]
        self.replicas.add("job-1", worker, CONFIG)
        listening = WorkerListening(worker=worker, host="127.0.0.1", port=replica.port)
        self.replicas.follow(MessageReceived("job-1", listening), ())
        yield replica
        server.close()  # the agent closes the connection

    def order(self, *named: Replica, to: Replica) -> None:
        self._generation += 1
        members = tuple(Member(worker=each.worker, host="127.0.0.1", port=each.port) for each in named)
        order = Order(job="job-1", generation=self._generation, members=members, secret="g" * 32)
        exited = WorkerExited("job-2", 9, WorkerExit(kind="left"))
        self.replicas.follow(exited, (SendToWorker("job-1", to.worker, order),))

    async def join(self, replica: Replica) -> None:
        """Order a generation that names a replica, and wait until it gets requests."""
        self.order(replica, to=replica)
        await until(lambda: replica.secret == CONFIG.secret.encode())
        await self._learner.connection.flush()

    def ask(
        self, method: str = "predict", body: bytes = b"[1]", *, seconds: float = FOREVER, may_wait: bool = True
    ) -> "asyncio.Task[Msg | None]":
        head = CallHead(method=method, seconds=seconds, may_wait=may_wait)
        asking = self._monitor.connection.request_once(
            subjects.call("job-1"), body, headers=head.headers(), seconds=20.0
        )
        return asyncio.create_task(asking)


@asynccontextmanager
async def house(pool: Pool) -> AsyncIterator[House]:
    await pool.bus("registry")  # it creates the streams
    made = House(await pool.bus("learner"), await pool.bus("monitor"))
    yield made
    await made.replicas.close()


async def reply_of(asked: "asyncio.Task[Msg | None]") -> tuple[ReplyHead, bytes]:
    reply = await asked
    assert reply is not None
    return ReplyHead.of(reply.headers), reply.data


async def test_requests_reach_a_replica_once_an_order_names_it_and_replies_those_who_asked(pool: Pool) -> None:
    async with house(pool) as host, host.replica() as replica:
        assert await host.ask() is None, "nobody listens yet"
        await host.join(replica)
        asked = [host.ask(body=f"[{number}]".encode()) for number in range(3)]
        await until(lambda: len(replica.requests) == 3)
        assert {head.method for head, _ in replica.requests} == {"predict"}
        for _ in range(3):
            replica.answer()
        assert [await reply_of(each) for each in asked] == [
            (ReplyHead(status="ok"), f"[{number}]".encode()) for number in range(3)
        ]


async def test_a_replica_that_no_order_has_named_yet_stays_when_others_are_named(pool: Pool) -> None:
    async with house(pool) as host, host.replica(0) as other, host.replica(1) as waiting:
        host.order(other, to=waiting)
        await host.join(waiting)
        asked = host.ask()
        await until(lambda: len(waiting.requests) == 1)
        waiting.answer()
        assert (await reply_of(asked))[0].status == "ok"
        assert not waiting.has_ended.is_set()


async def test_a_replica_that_leaves_gets_no_more_requests_and_answers_those_that_it_has(pool: Pool) -> None:
    async with house(pool) as host, host.replica(0) as leaver, host.replica(1) as other:
        await host.join(leaver)
        asked = host.ask()
        await until(lambda: len(leaver.requests) == 1)
        await host.join(other)
        host.order(other, to=leaver)
        later = [host.ask() for _ in range(10)]
        answered = 0
        while answered < 10:
            await until(lambda: other.requests or len(leaver.requests) > 1)
            (other if other.requests else leaver).answer()
            answered += 1
        assert not leaver.has_ended.is_set(), "it has a request"
        while leaver.requests:
            leaver.answer()
        for each in [asked, *later]:
            assert (await reply_of(each))[0].status == "ok"
        await until(leaver.has_ended.is_set)


async def test_a_replica_that_leaves_is_not_awaited_for_longer_than_those_who_asked_wait(pool: Pool) -> None:
    async with house(pool) as host, host.replica(0) as stuck, host.replica(1) as other:
        await host.join(stuck)
        asked = host.ask(seconds=0.3)
        await until(lambda: len(stuck.requests) == 1)
        host.order(other, to=stuck)
        await until(stuck.has_ended.is_set)
        assert (await reply_of(asked))[0].status == "lost"


async def test_what_a_replica_has_not_answered_when_it_dies_is_answered_for_it(pool: Pool) -> None:
    async with house(pool) as host, host.replica() as replica:
        await host.join(replica)
        asked = [host.ask("predict"), host.ask("charge")]
        await until(lambda: len(replica.requests) == 2)
        replica.die()
        heads = [(await reply_of(each))[0] for each in asked]
        assert [(head.status, head.is_idempotent) for head in heads] == [("lost", True), ("lost", False)]
        assert await host.ask() is None, "nobody listens any more"


async def test_a_replica_that_has_too_many_requests_is_busy(pool: Pool) -> None:
    async with house(pool) as host, host.replica() as replica:
        await host.join(replica)
        asked = [host.ask() for _ in range(ROOM)]
        await until(lambda: len(replica.requests) == ROOM)
        assert (await reply_of(host.ask()))[0].status == "busy"
        for _ in asked:
            replica.answer()
        assert {(await reply_of(each))[0].status for each in asked} == {"ok"}
        assert host.statuses == {"ok": ROOM, "busy": 1}


async def test_a_request_that_may_not_wait_is_taken_by_idle_replicas_alone(pool: Pool) -> None:
    async with house(pool) as host, host.replica() as replica:
        await host.join(replica)
        asked = host.ask(may_wait=False)
        await until(lambda: len(replica.requests) == 1)
        assert (await reply_of(host.ask(may_wait=False)))[0].status == "busy"
        replica.answer()
        assert (await reply_of(asked))[0].status == "ok"


async def test_a_replica_that_sends_nonsense_is_disconnected_and_what_it_has_is_lost(pool: Pool) -> None:
    for nonsense in (b"\xff" * 8, frame(CallHead(method="predict", seconds=1.0), b"")):
        async with house(pool) as host, host.replica() as replica:
            await host.join(replica)
            asked = host.ask()
            await until(lambda replica=replica: len(replica.requests) == 1)  # type: ignore[misc]
            replica.write(nonsense)
            assert (await reply_of(asked))[0].status == "lost"
            await until(replica.has_ended.is_set)


async def test_a_message_that_is_no_request_is_refused(pool: Pool) -> None:
    async with house(pool) as host, host.replica() as replica:
        await host.join(replica)
        monitor = await pool.bus("monitor", service="another")
        reply = await monitor.connection.request_once(subjects.call("job-1"), b"?", headers={}, seconds=20.0)
        assert reply is not None
        assert ReplyHead.of(reply.headers).status == "invalid"
        assert replica.requests == []


async def test_an_agent_that_ends_takes_no_more_requests(pool: Pool) -> None:
    async with house(pool) as host, host.replica() as replica:
        await host.join(replica)
        asked = host.ask()
        await until(lambda: len(replica.requests) == 1)
        await host.replicas.close()
        assert (await reply_of(asked))[0].status == "lost"
        assert await host.ask() is None


async def test_the_requests_that_replicas_have_are_counted_as_a_mean_over_time(pool: Pool) -> None:
    async with house(pool) as host, host.replica() as replica:
        await host.join(replica)
        host.replicas.take_in_flight()
        asked = [host.ask() for _ in range(3)]
        await until(lambda: len(replica.requests) == 3)
        host.replicas.take_in_flight()
        assert host.replicas.take_in_flight() == {("job-1", 0): 3.0}
        for _ in asked:
            replica.answer()
        await asyncio.gather(*asked)
        assert 0.0 < host.replicas.take_in_flight()["job-1", 0] <= 3.0
        assert host.replicas.take_in_flight() == {("job-1", 0): 0.0}
