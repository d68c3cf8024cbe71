"""Handshakes between workers: a peer that proves the secret gets a link, no other does."""

import asyncio
import socket

import pytest

from resile_learner.messages import Member
from resile_learner.worker import links
from resile_learner.worker.links import Credentials

Accepted = asyncio.Task[tuple[int, str]]


async def known(generation: int) -> Credentials:
    return Credentials(f"secret of {generation}", frozenset({0, 7}))


async def meet(
    *, secret: str, job: str = "j", credentials_of: links.CredentialsOf = known
) -> tuple[socket.socket, socket.socket, Accepted]:
    """Dial a listener of worker 0 as worker 7 of generation 3."""
    listener = links.listen("127.0.0.1")
    member = Member(worker=0, host="127.0.0.1", port=listener.getsockname()[1])
    dialing = asyncio.create_task(links.dial(member, job=job, worker=7, generation=3, secret=secret, kind="data"))
    sock, _ = await asyncio.get_running_loop().sock_accept(listener)
    sock.setblocking(False)
    accepted: Accepted = asyncio.create_task(links.accept(sock, job="j", worker=0, credentials_of=credentials_of))  # type: ignore[arg-type]
    listener.close()
    try:
        return await dialing, sock, accepted
    except BaseException:
        await asyncio.wait([accepted])
        assert isinstance(accepted.exception(), links.LinkRefused)
        assert sock.fileno() == -1, "a refused connection is closed"
        raise


async def test_both_sides_prove_the_secret_and_the_socket_is_theirs() -> None:
    mine, theirs, accepted = await meet(secret="secret of 3")
    assert await accepted == (7, "data")
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(mine, b"first byte after the handshake")
    assert await loop.sock_recv(theirs, 100) == b"first byte after the handshake"
    mine.close()
    theirs.close()


async def test_a_dialer_without_the_secret_is_refused() -> None:
    with pytest.raises(links.LinkRefused, match="did not prove"):
        await meet(secret="a guess")


async def test_a_handshake_of_another_job_is_refused() -> None:
    with pytest.raises(links.LinkRefused):
        await meet(secret="secret of 3", job="another")


async def test_an_acceptor_waits_for_the_order_that_brings_the_secret() -> None:
    arrived = asyncio.Event()

    async def later(generation: int) -> Credentials:
        await arrived.wait()
        return await known(generation)

    meeting = asyncio.create_task(meet(secret="secret of 3", credentials_of=later))
    await asyncio.sleep(0)
    assert not meeting.done()
    arrived.set()
    mine, theirs, accepted = await meeting
    assert await accepted == (7, "data")
    mine.close()
    theirs.close()


@pytest.mark.parametrize("garbage", [b"", b"\x00\x00\x00\x02{}", b"\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n"])
async def test_garbage_is_refused(garbage: bytes) -> None:
    left, right = socket.socketpair()
    left.setblocking(False)
    right.sendall(garbage)
    right.shutdown(socket.SHUT_WR)
    with pytest.raises(links.LinkRefused):
        await links.accept(left, job="j", worker=0, credentials_of=known)
    right.close()


async def test_a_link_that_the_acceptor_closes_before_it_confirms_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        member = Member(worker=0, host="127.0.0.1", port=listener.getsockname()[1])
        dialing = asyncio.create_task(
            links.dial(member, job="j", worker=7, generation=3, secret="secret of 3", kind="data")
        )
        sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        sent: list[links.Message] = []
        send = links._send

        async def close_instead_of_confirming(sock: socket.socket, message: links.Message) -> None:
            sent.append(message)
            if isinstance(message, links.HandshakeConfirmation):
                raise ConnectionResetError
            await send(sock, message)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(links, "_send", close_instead_of_confirming)
            with pytest.raises(links.LinkRefused):
                await links.accept(sock, job="j", worker=0, credentials_of=known)
        with pytest.raises(links.LinkRefused, match="closed during the handshake"):
            await dialing
        assert isinstance(sent[-1], links.HandshakeConfirmation)
