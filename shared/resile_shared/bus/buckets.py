"""Key-value buckets of JetStream, typed by the model of their values: with compare-and-set, or fenced.

Revisions rise with every change of a bucket. A write is sent until it is answered, and takes effect once. Where several
writers share a bucket, each write names the revision that it replaces. Where one leader at a time writes, each write
names the leader's fence instead: the revision of the key that a new leader writes first, so that every write of an
earlier leader is refused from then on, that of a new key too.
"""

import logging
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from nats.aio.msg import Msg
from opentelemetry.propagate import inject
from pydantic import BaseModel, ValidationError

from ..errors import ResileError
from ..validation import describe
from .connection import Connection, StoreFailed
from .consumer import Consumer, ConsumerCreated
from .envelope import encode
from .subjects import BucketSpec

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
WRONG_LAST_SEQUENCE = 10071
_PURGE = {"KV-Operation": "PURGE", "Nats-Rollup": "sub", "Nats-TTL": "86400s"}
"""Headers that delete a key: watchers that reconnect within a day learn of it; then nothing is left of the key."""


class ConflictError(ResileError):
    """Another writer changed the key first: read it, and decide again."""

    def __init__(self, bucket: str, key: str, revision: int) -> None:
        super().__init__(f"{bucket}/{key} is no longer at revision {revision}")
        self.bucket, self.key, self.revision = bucket, key, revision


class FencedError(ResileError):
    """A writer with a later epoch has taken the bucket over."""

    def __init__(self, bucket: str, epoch: int) -> None:
        super().__init__(f"a writer with an epoch later than {epoch} has taken over {bucket}")
        self.bucket, self.epoch = bucket, epoch


class UnreadableError(ResileError):
    """A stored value does not match the bucket's model: it is damaged, or of another version."""

    def __init__(self, bucket: str, key: str, revision: int, reason: str) -> None:
        super().__init__(f"stored value {bucket}/{key} is invalid: {reason}")
        self.bucket, self.key, self.revision = bucket, key, revision


@dataclass(frozen=True)
class Entry(Generic[M]):
    """A value, and the revision that an update must name."""

    key: str
    value: M
    revision: int


@dataclass(frozen=True)
class Fence:
    """The right to write a bucket, as long as no later epoch has taken it over."""

    epoch: int
    revision: int


@dataclass(frozen=True)
class Change(Generic[M]):
    """A change seen by a watch: a new value, or None for a deleted key."""

    key: str
    value: M | None
    revision: int
    headers: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The context of the span in which it was written, for `telemetry.continued`; empty: none."""


class Bucket(Generic[M]):
    """One bucket. Every call waits while NATS is disconnected."""

    def __init__(self, connection: Connection, spec: BucketSpec[M]) -> None:
        self._connection = connection
        self._spec = spec

    @property
    def name(self) -> str:
        """The name of the bucket."""
        return self._spec.name

    async def get(self, key: str) -> Entry[M] | None:
        """Return the value, None where there is none. Raises UnreadableError."""
        found = await self._last(key)
        if found is None or _is_deleted(found[0]):
            return None
        message, revision = found
        return Entry(key, self._read(key, message.data, revision), revision)

    async def create(self, key: str, value: M) -> int:
        """Store the first value of a key; return its revision. Raises ConflictError when the key exists."""
        try:
            return await self._write(key, value, revision=0)
        except ConflictError:
            found = await self._last(key)
            if found is None or not _is_deleted(found[0]):
                raise
            return await self._write(key, value, revision=found[1])

    async def update(self, key: str, value: M, *, revision: int) -> int:
        """Replace the value that has ``revision``; return the new one. Raises ConflictError."""
        return await self._write(key, value, revision=revision)

    async def delete(self, key: str, *, revision: int, message_id: str = "") -> None:
        """Remove the value that has ``revision``. Raises ConflictError."""
        subject = self._spec.subject(key)
        await self._send(subject, b"", revision=revision, headers=_PURGE.copy(), message_id=message_id)

    async def was_deleted(self, key: str, *, message_id: str) -> bool:
        """Whether ``message_id`` has deleted a key that was not created again since; known for a day."""
        found = await self._last(key)
        return found is not None and _is_deleted(found[0]) and _message_id(found[0]) == message_id

    async def take_over(self, epoch: int) -> Fence:
        """Fence off all earlier epochs; what is read from now on is all that they wrote. Raises FencedError."""
        while True:
            found = await self._newest(self._spec.fence)
            known, revision = (int(found[0].data), found[1]) if found else (0, 0)
            if known > epoch:
                raise FencedError(self._spec.name, epoch)
            with suppress(ConflictError):
                return Fence(epoch, await self._send(self._spec.fence, b"%d" % epoch, revision=revision, headers={}))

    async def put(self, key: str, value: M, *, fence: Fence) -> None:
        """Store a value as the only writer. Raises FencedError."""
        await self._send_fenced(key, encode(value), fence, {})

    async def remove(self, key: str, *, fence: Fence) -> None:
        """Remove a value as the only writer. Raises FencedError."""
        await self._send_fenced(key, b"", fence, _PURGE.copy())

    async def entries(self, *, unreadable: set[str] | None = None) -> dict[str, Entry[M]]:
        """Return all valid values, by key; add the keys of the others to ``unreadable``."""
        async with aclosing(self.watch(unreadable=unreadable)) as changes:
            async for present in changes:
                return {c.key: Entry(c.key, c.value, c.revision) for c in present if c.value is not None}
        raise AssertionError("a watch never ends")

    async def keys(self) -> list[str]:
        """Return all keys, sorted."""
        return sorted(await self.entries())

    async def watch(
        self, key: str = "*", *, unreadable: set[str] | None = None
    ) -> AsyncGenerator[tuple[Change[M], ...], None]:
        """Yield first the current state of ``key`` or of all keys, which may be empty, then each change. Never ends.

        After an outage it continues with the changes made meanwhile. An invalid value is logged and
        skipped, and its key added to ``unreadable``.
        """
        consumer = Consumer(
            self._connection, self._spec.stream, (f"{self._spec.prefix}{key}",), start="last_per_subject"
        )
        present: list[Change[M]] | None = []
        missing = 0
        async with aclosing(consumer.read()) as items:
            async for item in items:
                if isinstance(item, ConsumerCreated):
                    missing = item.num_pending
                else:
                    missing -= 1
                    changes = self._change(item, unreadable)
                    if present is None and changes:
                        yield changes
                    elif present is not None:
                        present += changes
                if present is not None and missing <= 0:
                    yield tuple(present)
                    present = None

    def _change(self, message: Msg, unreadable: set[str] | None) -> tuple[Change[M], ...]:
        key = message.subject.removeprefix(self._spec.prefix)
        revision = message.metadata.sequence.stream
        if _is_deleted(message):
            return (Change(key, None, revision),)
        try:
            value = self._read(key, message.data, revision)
        except UnreadableError as error:
            logger.error("%s", error)
            if unreadable is not None:
                unreadable.add(key)
            return ()
        found = message.headers or {}
        context = {name: value for name, value in found.items() if name in ("traceparent", "tracestate")}
        return (Change(key, value, revision, context),)

    def _read(self, key: str, body: bytes, revision: int) -> M:
        try:
            return self._spec.model.model_validate_json(body)
        except ValidationError as error:
            raise UnreadableError(self._spec.name, key, revision, describe(error)) from error

    async def _last(self, key: str) -> tuple[Msg, int] | None:
        """Return the newest message of a key, a value or a delete marker, and its revision."""
        return await self._newest(self._spec.subject(key))

    async def _newest(self, subject: str) -> tuple[Msg, int] | None:
        message = await self._connection.request(f"$JS.API.DIRECT.GET.{self._spec.stream}.{subject}", b"")
        headers = message.headers or {}
        if headers.get("Status") == "404":
            return None
        if "Nats-Sequence" not in headers:
            raise StoreFailed(message.subject, {"description": headers.get("Description", "no sequence")})
        return message, int(headers["Nats-Sequence"])

    async def _write(self, key: str, value: M, *, revision: int) -> int:
        return await self._send(self._spec.subject(key), encode(value), revision=revision, headers={})

    async def _send(
        self, subject: str, body: bytes, *, revision: int, headers: dict[str, str], message_id: str = ""
    ) -> int:
        inject(headers)
        message_id = message_id or secrets.token_hex(16)
        headers |= {"Nats-Expected-Last-Subject-Sequence": str(revision), "Nats-Msg-Id": message_id}
        try:
            answer = await self._connection.request_store(subject, body, headers=headers)
        except StoreFailed as error:
            if error.code != WRONG_LAST_SEQUENCE:
                raise
            # The server checks the revision before it checks for duplicates: if the first answer was late or lost, the
            # second attempt fails like this although the first one succeeded.
            found = await self._newest(subject)
            if found is None or _message_id(found[0]) != message_id:
                key = subject.removeprefix(self._spec.prefix)
                raise ConflictError(self._spec.name, key, revision) from None
            return found[1]
        return int(answer["seq"])

    async def _send_fenced(self, key: str, body: bytes, fence: Fence, headers: dict[str, str]) -> None:
        inject(headers)
        headers |= {
            "Nats-Expected-Last-Subject-Sequence": str(fence.revision),
            "Nats-Expected-Last-Subject-Sequence-Subject": self._spec.fence,
            "Nats-Msg-Id": secrets.token_hex(16),
        }
        try:
            await self._connection.request_store(self._spec.subject(key), body, headers=headers)
        except StoreFailed as error:
            if error.code != WRONG_LAST_SEQUENCE:
                raise
            raise FencedError(self._spec.name, fence.epoch) from None


def _message_id(message: Msg) -> str | None:
    return (message.headers or {}).get("Nats-Msg-Id")


def _is_deleted(message: Msg) -> bool:
    return (message.headers or {}).get("KV-Operation") in ("DEL", "PURGE")
