"""Whatever comes over a link between workers: it ends that link at the most, at once, and nothing grows."""

import asyncio
import socket
import struct
from contextlib import suppress

import hypothesis.strategies as st
import orjson
from hypothesis import given

from resile_learner.collectives.frames import Kind, encode
from resile_learner.collectives.spec import Abandoned, Tag
from resile_learner.messages import Member
from resile_learner.worker import links
from resile_learner.worker.links import Credentials
from tests.learner.link_group import Group, make_work, start
from tests.learner.test_strangers import OPENING, Victim

from .documents import ANYTHING
from .fuzzing import fuzzed

NUMBERS = st.integers(-1, 5) | st.sampled_from([2**31, 2**53, 2**64 - 1, 2**64, 10**30])
OPENINGS = st.fixed_dictionaries(
    {}, optional={field: ANYTHING | NUMBERS | st.just(OPENING[field]) for field in OPENING}
)
LENGTHS = st.sampled_from([0, 1, 4096, 4097, 2**31, 2**32 - 1])
LINES = (
    st.binary(max_size=60)
    | ANYTHING.filter(lambda value: not isinstance(value, float | int)).map(
        lambda value: str(value).encode("utf-8", "ignore")
    )
    | st.fixed_dictionaries(
        {
            "kind": st.sampled_from(
                ["heartbeat", "order_request", "joiner_ready", "active_generation", "committed_round"]
            )
        },
        optional={"generation": NUMBERS, "round": NUMBERS},
    ).map(lambda message: str(message).replace("'", '"').encode())
    | st.lists(NUMBERS, max_size=5).map(
        lambda behind: f'{{"kind":"committed_rounds","generation":1,"round":3,"behind":{behind}}}'.encode()
    )
)
UINT16, UINT32, UINT64 = (st.sampled_from([0, 1, 2, 7, 2**bits - 1]) for bits in (16, 32, 64))


def framed(body: bytes, length: int | None = None) -> bytes:
    return struct.pack(">I", len(body) if length is None else length) + body


async def known(generation: int) -> Credentials:
    return Credentials("s", frozenset({0, 1}))


@fuzzed(examples=200)
@given(st.lists(st.binary(max_size=80) | OPENINGS, max_size=3), LENGTHS | st.none())
def test_a_stranger_that_dials_is_refused(messages: list[bytes | dict[str, object]], length: int | None) -> None:
    async def meet() -> None:
        ours, theirs = socket.socketpair()
        bodies = [m if isinstance(m, bytes) else str(m).replace("'", '"').encode("utf-8", "ignore") for m in messages]
        theirs.sendall(b"".join(framed(body, length) for body in bodies))
        theirs.shutdown(socket.SHUT_WR)
        try:
            await links.accept(ours, job="j", worker=0, credentials_of=known)
            raise AssertionError("nobody proved anything")
        except links.LinkRefused:
            assert ours.fileno() == -1
        theirs.close()

    asyncio.run(meet())


@fuzzed(examples=50)
@given(st.binary(max_size=80) | ANYTHING, LENGTHS | st.none())
def test_a_stranger_that_is_dialed_is_refused(answer: object, length: int | None) -> None:
    async def meet() -> None:
        body = answer if isinstance(answer, bytes) else orjson.dumps(str(answer).encode("utf-8", "ignore").decode())
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            member = Member(worker=0, host="127.0.0.1", port=listener.getsockname()[1])
            dialing = asyncio.create_task(links.dial(member, job="j", worker=1, generation=1, secret="s", kind="data"))
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            sock.sendall(framed(body, length))
            sock.shutdown(socket.SHUT_WR)
            try:
                await dialing
                raise AssertionError("nobody proved anything")
            except (links.LinkRefused, OSError):
                pass
            sock.close()

    asyncio.run(meet())


@fuzzed(examples=30)
@given(st.lists(LINES, max_size=6))
def test_what_a_member_sends_on_its_control_connection_ends_that_at_the_most(lines: list[bytes]) -> None:
    async def meet() -> None:
        victim = Victim()
        try:
            await victim.peer_joins()
            control = victim.sockets[0]
            control.setblocking(True)
            with suppress(OSError):  # it has closed the connection already
                control.sendall(b"".join(line + b"\n" for line in lines))
                control.shutdown(socket.SHUT_WR)
                while await asyncio.to_thread(control.recv, 65536):
                    pass
            assert victim.control._fault is None
        finally:
            victim.close()

    asyncio.run(meet())


@fuzzed(examples=60)
@given(
    st.lists(
        st.binary(max_size=60)
        | st.builds(
            lambda kind, generation, number, bucket, block, length, payload: (
                encode(kind, Tag(generation, number), bucket=bucket, block=block, length=length) + payload
            ),
            st.sampled_from(Kind),
            UINT64,
            UINT64,
            UINT32,
            UINT32,
            st.sampled_from([0, 1, 8, 9, 64, 2**20, 2**63]),
            st.binary(max_size=64),
        ),
        max_size=6,
    )
)
def test_what_a_member_sends_on_its_data_connection_ends_the_round_at_the_most(frames: list[bytes]) -> None:
    group = Group(1)
    there = group.stranger(member=0, worker=1)
    work = make_work(4, [40, 7])
    running = start(lambda: group.nodes[0].run_round(work.spec(0, (0, 1), Tag(1, 1)), b"header"))
    with suppress(OSError):  # it has closed the connection already
        there.sendall(b"".join(frames))
        there.shutdown(socket.SHUT_WR)
    with suppress(TimeoutError):
        running.exception(0.2)
    group.nodes[0].poller.remove(1)  # what was deferred waits, until the control connection ends too
    error = running.exception(60)
    assert isinstance(error, Abandoned), error
    assert error.suspect in (0, 1)
    there.close()
    group.close()
