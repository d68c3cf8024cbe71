"""Links between workers: dialing, accepting, and the handshake that proves the secret of a generation.

A handshake is four small messages, each a length and a JSON object. The dialer names itself and its generation; the
acceptor proves that it knows that generation's secret, then the dialer does. The acceptor confirms that: until then it
may still close the connection, and nobody would notice if the dialer counted on it. The acceptor may receive the order
later than the dialer, so it waits for the secret as long as a handshake may last. Until then the dialer may be anybody:
all that it sends is bounded, and nothing that it names is kept.
"""

import asyncio
import hashlib
import hmac
import math
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal, NamedTuple

import orjson
from pydantic import Field, ValidationError

from resile_shared.errors import ResileError

from ..messages import Generation, Member, Message, Order, WorkerId

OPENING_SECONDS = 5.0
HANDSHAKE_SECONDS = 30.0
MAX_MESSAGE_BYTES = 4096
KEEPALIVE_PROBES = 3
_BACKLOG = 1024
_LENGTH = struct.Struct(">I")

Kind = Literal["control", "data"]
KINDS: tuple[Kind, ...] = ("control", "data")
Nonce = Annotated[str, Field(pattern=r"\A[0-9a-f]{32}\z")]
Proof = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]
MAX_KEPT = 16
"""At most this many orders count. A worker further behind is dropped by one of them, which its agent sends it."""


class Credentials(NamedTuple):
    """What a handshake for one generation is checked against."""

    secret: str
    workers: frozenset[int]


CredentialsOf = Callable[[int], Awaitable[Credentials]]


class LinkRefused(ResileError):
    """The other side of a worker link did not prove that it belongs to the generation it named."""


class HandshakeOpening(Message):
    """The dialer's first message."""

    job: str = Field(max_length=64)
    dialer: WorkerId
    acceptor: WorkerId
    generation: Generation
    kind: Kind
    nonce: Nonce


class HandshakeAnswer(Message):
    """The acceptor's first message."""

    nonce: Nonce
    proof: Proof


class HandshakeProof(Message):
    """The dialer's second message."""

    proof: Proof


class HandshakeConfirmation(Message):
    """The acceptor's second message: the link is there."""


def _prove(secret: str, side: str, opening: HandshakeOpening, answer_nonce: str) -> str:
    text = orjson.dumps([side, opening.model_dump(), answer_nonce])
    return hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()


def listen(host: str) -> socket.socket:
    """A listening socket on a free port of ``host``."""
    listener = socket.create_server((host, 0), backlog=_BACKLOG)
    listener.setblocking(False)
    return listener


def keep_alive(sock: socket.socket, *, seconds: float) -> None:
    """Let an idle connection break when the peer's system does not answer for about ``seconds``, at least 4."""
    interval = max(1, math.ceil(seconds / (KEEPALIVE_PROBES + 1)))
    for option, value in (
        (socket.TCP_KEEPIDLE, interval),
        (socket.TCP_KEEPINTVL, interval),
        (socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


async def dial(member: Member, *, job: str, worker: int, generation: int, secret: str, kind: Kind) -> socket.socket:
    """Connect to ``member`` and prove membership of ``generation``.

    Raises OSError when it cannot be reached, LinkRefused when it does not prove its membership.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            await asyncio.get_running_loop().sock_connect(sock, (member.host, member.port))
            opening = HandshakeOpening(
                job=job,
                dialer=worker,
                acceptor=member.worker,
                generation=generation,
                kind=kind,
                nonce=secrets.token_hex(16),
            )
            await _send(sock, opening)
            answer = HandshakeAnswer.model_validate_json(await _receive(sock))
            if not hmac.compare_digest(answer.proof, _prove(secret, "acceptor", opening, answer.nonce)):
                raise LinkRefused(f"worker {member.worker} did not prove membership of generation {generation}")
            await _send(sock, HandshakeProof(proof=_prove(secret, "dialer", opening, answer.nonce)))
            HandshakeConfirmation.model_validate_json(await _receive(sock))
    except (TimeoutError, ValueError) as error:  # ValueError: an answer or a host name that cannot be one
        sock.close()
        raise LinkRefused(f"worker {member.worker} did not complete the handshake: {error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


async def accept(sock: socket.socket, *, job: str, worker: int, credentials_of: CredentialsOf) -> tuple[int, Kind]:
    """Answer the handshake on an accepted ``sock``; return the dialer and the kind of the link.

    Raises LinkRefused, after closing ``sock``, when the dialer does not prove its membership.
    """
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            async with asyncio.timeout(OPENING_SECONDS):
                opening = HandshakeOpening.model_validate_json(await _receive(sock))
            if opening.job != job or opening.acceptor != worker:
                raise LinkRefused(
                    f"a handshake for worker {opening.acceptor} of job {opening.job} reached worker {worker} of {job}"
                )
            credentials = await credentials_of(opening.generation)
            # A leaver connects to the joiners of a generation that nobody continues in; its id is lower than theirs.
            may_be_leaver = opening.dialer < worker
            if opening.dialer == worker or not (may_be_leaver or opening.dialer in credentials.workers):
                raise LinkRefused(f"generation {opening.generation} has no other worker {opening.dialer}")
            nonce = secrets.token_hex(16)
            proof = _prove(credentials.secret, "acceptor", opening, nonce)
            await _send(sock, HandshakeAnswer(nonce=nonce, proof=proof))
            answer = HandshakeProof.model_validate_json(await _receive(sock))
            if not hmac.compare_digest(answer.proof, _prove(credentials.secret, "dialer", opening, nonce)):
                raise LinkRefused(
                    f"worker {opening.dialer} did not prove membership of generation {opening.generation}"
                )
            await _send(sock, HandshakeConfirmation())
    except (TimeoutError, ValidationError, OSError, EOFError) as error:
        sock.close()
        raise LinkRefused(f"the handshake failed: {error!r}") from error
    except BaseException:
        sock.close()
        raise
    return opening.dialer, opening.kind


async def _send(sock: socket.socket, message: Message) -> None:
    body = message.model_dump_json().encode()
    await asyncio.get_running_loop().sock_sendall(sock, _LENGTH.pack(len(body)) + body)


async def _receive(sock: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(await _receive_exactly(sock, _LENGTH.size))
    if length > MAX_MESSAGE_BYTES:
        raise LinkRefused(f"a handshake message of {length} bytes is too long")
    return await _receive_exactly(sock, length)


async def _receive_exactly(sock: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = await asyncio.get_running_loop().sock_recv(sock, length - len(data))
        if not more:
            raise LinkRefused("the connection was closed during the handshake")
        data += more
    return data


class Generations:
    """The credentials of the newest orders. They alone are kept, whatever peers ask for."""

    def __init__(self) -> None:
        self._credentials: dict[int, Credentials] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._credentials)

    def add(self, order: Order) -> None:
        """Let the workers of ``order`` prove that they belong to it."""
        self._credentials.setdefault(order.generation, Credentials(order.secret, frozenset(order.workers)))
        while len(self._credentials) > MAX_KEPT:
            del self._credentials[min(self._credentials)]
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_for(self, generation: int) -> Credentials:
        """Return the credentials of ``generation`` once its order has arrived; wait forever if it never does."""
        while generation not in self._credentials:
            await self._changed.wait()
        return self._credentials[generation]
