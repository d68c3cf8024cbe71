"""Requests to replicas of services, and their replies: as headers of the bus, and as frames between agent and replica.

A request travels from the monitor over the bus to the agent of a replica, and from there over a connection of its own
to the replica's process. Its body is not looked into on the way.

A frame is two lengths of four bytes (big-endian), a JSON head, and the body. Both ends bound what they read.
"""

import asyncio
import struct
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, ValidationError

from .errors import ResileError
from .messages.message import Count, Message

MAX_CALL_BYTES = 900_000
"""The largest body of a request or a reply; the bus takes a megabyte, headers included."""
MAX_HEAD_BYTES = 65_536
JSON = "application/json"
IDEMPOTENT = "__resile_idempotent__"
"""The attribute of a method that may be computed twice (`resile.idempotent`)."""
_LENGTHS = struct.Struct(">II")
Status = Literal["ok", "failed", "invalid", "unknown", "busy", "late", "lost", "too large"]
RETRIED: frozenset[Status] = frozenset({"busy"})
"""Another replica may answer: the request had no effect."""


class BadFrame(ResileError):
    """A frame that the other end of a connection would not send."""


class ReplicaHead(Message):
    """What a replica says first: which of its methods may be computed twice."""

    idempotent: tuple[str, ...] = Field(default=(), max_length=1000)


class CallHead(Message):
    """What is asked of a replica. After ``seconds``, nobody waits for the reply: clocks of hosts may differ."""

    number: Count = 0
    method: str = Field(max_length=200)
    seconds: float = Field(allow_inf_nan=False)
    may_wait: bool = Field(default=True, description="whether it may wait in the replica for others to be computed")

    def headers(self) -> dict[str, str]:
        """Return the headers of the message on the bus."""
        return {
            "resile-method": self.method,
            "resile-seconds": repr(self.seconds),
            "resile-may-wait": str(self.may_wait).lower(),
        }

    @classmethod
    def of(cls, headers: Mapping[str, str] | None, *, number: int) -> "CallHead":
        """Return the head of a request on the bus. Raises BadFrame."""
        found = headers or {}
        method, seconds = found.get("resile-method", ""), found.get("resile-seconds", "nan")
        try:
            may_wait = found.get("resile-may-wait") != "false"
            return cls(number=number, method=method, seconds=float(seconds), may_wait=may_wait)
        except (ValidationError, ValueError) as error:
            raise BadFrame(f"not a request to a replica: {error}") from None


class ReplyHead(Message):
    """How a request ended; if not ``ok``, the body is one line of text. ``is_idempotent``: it may be sent again."""

    number: Count = 0
    status: Status
    is_idempotent: bool = False

    def headers(self) -> dict[str, str]:
        """Return the headers of the message on the bus."""
        return {"resile-status": self.status, "resile-idempotent": str(self.is_idempotent).lower()}

    @classmethod
    def of(cls, headers: Mapping[str, str] | None) -> "ReplyHead":
        """Return the head of a reply on the bus. Raises BadFrame."""
        found = headers or {}
        try:
            return cls.model_validate(
                {"status": found.get("resile-status"), "is_idempotent": found.get("resile-idempotent") == "true"}
            )
        except ValidationError as error:
            raise BadFrame(f"not a reply of a replica: {error}") from None


def frame(head: Message, body: bytes) -> bytes:
    """Return a frame."""
    encoded = head.model_dump_json().encode()
    return _LENGTHS.pack(len(encoded), len(body)) + encoded + body


async def read_frame(reader: asyncio.StreamReader) -> tuple[bytes, bytes] | None:
    """Return the head and the body of the next frame, None at the end. Raises BadFrame."""
    try:
        head, body = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
        if head > MAX_HEAD_BYTES or body > MAX_CALL_BYTES:
            raise BadFrame(f"a frame of {head} and {body} bytes")
        return await reader.readexactly(head), await reader.readexactly(body)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
