"""Key-value buckets of JetStream with compare-and-set, typed by the model of their values.

Revisions rise with every change of a bucket. A write is sent again until it is answered and has its effect once.
"""

import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from nats.aio.msg import Msg
from opentelemetry.propagate import inject
from pydantic import BaseModel, ValidationError

from .connection import Connection, StoreFailed
from .envelope import describe, encode
from .errors import ResileError
from .pull import Begin, Reader
from .subjects import Keys

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
_WRONG_LAST_SEQUENCE = 10071


class ConflictError(ResileError):
    """Somebody else changed the key first: read it again, and decide again."""

    def __init__(self, bucket: str, key: str, revision: int) -> None:
        super().__init__(f"{bucket}/{key} is no longer at revision {revision}")
        self.bucket, self.key, self.revision = bucket, key, revision


class UnreadableError(ResileError):
    """A stored value is not of the bucket's model."""

    def __init__(self, bucket: str, key: str, reason: str) -> None:
        super().__init__(f"{bucket}/{key} cannot be read: {reason}")
        self.bucket, self.key = bucket, key


@dataclass(frozen=True)
class Entry(Generic[M]):
    """A value, and the revision that a change of it must name."""

    key: str
    value: M
    revision: int


@dataclass(frozen=True)
class Change(Generic[M]):
    """What a watch saw: a new value, or None for a key that is gone."""

    key: str
    value: M | None
    revision: int
    traceparent: str = field(default="", compare=False)
    """The trace in which it was written, for `telemetry.continued`; empty without one."""

    @property
    def headers(self) -> dict[str, str]:
        """What `telemetry.continued` goes on from."""
        return {"traceparent": self.traceparent} if self.traceparent else {}


class Bucket(Generic[M]):
    """One bucket. Every call waits for a bus that is away."""

    def __init__(self, connection: Connection, keys: Keys[M]) -> None:
        self._connection = connection
        self._keys = keys

    async def get(self, key: str) -> Entry[M] | None:
        """Return the value, None where there is none. Raises UnreadableError."""
        found = await self._last(key)
        if found is None or _is_gone(found[0]):
            return None
        message, revision = found
        return Entry(key, self._read(key, message.data), revision)

    async def create(self, key: str, value: M) -> int:
        """Store the first value of a key; return its revision. Raises ConflictError when the key is there."""
        try:
            return await self._write(key, value, revision=0)
        except ConflictError:
            found = await self._last(key)
            if found is None or not _is_gone(found[0]):
                raise
            return await self._write(key, value, revision=found[1])

    async def update(self, key: str, value: M, *, revision: int) -> int:
        """Replace the value that has ``revision``; return the new one. Raises ConflictError."""
        return await self._write(key, value, revision=revision)

    async def delete(self, key: str, *, revision: int) -> None:
        """Remove the value that has ``revision``. Raises ConflictError."""
        await self._send(key, b"", revision=revision, headers={"KV-Operation": "PURGE", "Nats-Rollup": "sub"})

    async def entries(self) -> dict[str, Entry[M]]:
        """Return all that is stored now and can be read, by key."""
        async with aclosing(self.watch()) as changes:
            async for present in changes:
                return {c.key: Entry(c.key, c.value, c.revision) for c in present if c.value is not None}
        raise AssertionError("a watch never ends")

    async def keys(self) -> list[str]:
        """Return all keys, sorted."""
        return sorted(await self.entries())

    async def watch(self, key: str = "*") -> AsyncGenerator[tuple[Change[M], ...], None]:
        """Yield first the whole present state, which may be empty, and then each change, for ever: of ``key`` or all.

        After an outage it goes on with what changed meanwhile. A value that cannot be read is logged and left out.
        """
        reader = Reader(self._connection, self._keys.stream, (f"{self._keys.prefix}{key}",), start="last_per_subject")
        present: list[Change[M]] | None = []
        missing = 0
        async with aclosing(reader.read()) as items:
            async for item in items:
                if isinstance(item, Begin):
                    missing = item.num_pending
                else:
                    missing -= 1
                    changes = self._change(item)
                    if present is None and changes:
                        yield changes
                    elif present is not None:
                        present += changes
                if present is not None and missing <= 0:
                    yield tuple(present)
                    present = None

    def _change(self, message: Msg) -> tuple[Change[M], ...]:
        key = message.subject.removeprefix(self._keys.prefix)
        revision = message.metadata.sequence.stream
        if _is_gone(message):
            return (Change(key, None, revision),)
        try:
            value = self._read(key, message.data)
        except UnreadableError as error:
            logger.error("%s", error)
            return ()
        return (Change(key, value, revision, (message.headers or {}).get("traceparent", "")),)

    def _read(self, key: str, body: bytes) -> M:
        try:
            return self._keys.model.model_validate_json(body)
        except ValidationError as error:
            raise UnreadableError(self._keys.name, key, describe(error)) from error

    async def _last(self, key: str) -> tuple[Msg, int] | None:
        """Return the newest message of a key, be it a value or the mark of a removal, and its revision."""
        message = await self._connection.request(
            f"$JS.API.DIRECT.GET.{self._keys.stream}.{self._keys.subject(key)}", b""
        )
        headers = message.headers or {}
        if headers.get("Status") == "404":
            return None
        if "Nats-Sequence" not in headers:
            raise StoreFailed(message.subject, {"description": headers.get("Description", "no sequence")})
        return message, int(headers["Nats-Sequence"])

    async def _write(self, key: str, value: M, *, revision: int) -> int:
        return await self._send(key, encode(value), revision=revision, headers={})

    async def _send(self, key: str, body: bytes, *, revision: int, headers: dict[str, str]) -> int:
        inject(headers)
        message_id = secrets.token_hex(16)
        headers |= {"Nats-Expected-Last-Subject-Sequence": str(revision), "Nats-Msg-Id": message_id}
        try:
            answer = await self._connection.request_store(self._keys.subject(key), body, headers=headers)
        except StoreFailed as error:
            if error.code != _WRONG_LAST_SEQUENCE:
                raise
            # The server looks at the revision before it looks whether it knows the message: if the first answer came
            # late, or was lost, this is what became of the second arrival.
            found = await self._last(key)
            if found is None or (found[0].headers or {}).get("Nats-Msg-Id") != message_id:
                raise ConflictError(self._keys.name, key, revision) from None
            return found[1]
        return int(answer["seq"])


def _is_gone(message: Msg) -> bool:
    return (message.headers or {}).get("KV-Operation") in ("DEL", "PURGE")
