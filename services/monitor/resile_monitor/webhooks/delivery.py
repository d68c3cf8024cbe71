"""The asyncio shell: follows the events that end jobs, and sends them to each receiver in order.

Each receiver has a task of its own, so that one that hangs delays nobody else; what is not delivered yet waits in the
event stream, and takes no memory.
"""

import asyncio
import logging
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import aiohttp

from resile_shared.bus.buckets import Change, ConflictError
from resile_shared.bus.client import Bus
from resile_shared.bus.envelope import Received
from resile_shared.bus.subjects import EVENTS, WEBHOOKS, job_events_of_kind
from resile_shared.errors import ResileError
from resile_shared.messages.jobs import JobEvent
from resile_shared.messages.webhooks import Webhook

from ..trace_urls import url_of
from .core import Delivery, Pace, claimed, delivery, seconds_to_wait, settled

logger = logging.getLogger(__name__)

KINDS = ("completed", "failed", "stopped")
TROUBLE_SECONDS = 5.0
"""Pause after an error that has nothing to do with the receiver."""


@dataclass
class _Receiver:
    """The newest record of one webhook, and what wakes its task."""

    webhook: Webhook
    revision: int
    changed_at: float = field(default_factory=time.monotonic)
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None

    def store(self, webhook: Webhook, revision: int) -> None:
        if revision > self.revision:
            self.webhook, self.revision, self.changed_at = webhook, revision, time.monotonic()
            self.woken.set()


class Deliveries:
    """Delivers to all receivers, as far as no other monitor does."""

    def __init__(self, bus: Bus, pace: Pace, *, trace_url: str = "") -> None:
        """``trace_url`` is where a collector shows a trace: see `trace_urls`."""
        self._bus = bus
        self._trace_url = trace_url
        self._bucket = bus.bucket(WEBHOOKS)
        self._pace = pace
        self._name = f"monitor-{secrets.token_hex(8)}"
        self._receivers: dict[str, _Receiver] = {}

    async def run(self) -> None:
        """Deliver until cancelled."""
        timeout = aiohttp.ClientTimeout(total=self._pace.attempt_seconds)
        async with (
            aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as http,
            asyncio.TaskGroup() as group,
        ):
            follows = asyncio.Event()
            group.create_task(self._wake_at_events(follows))
            await follows.wait()  # an event after a receiver's last look must wake it
            async for changes in self._bucket.watch():
                for change in changes:
                    self._store(change, group, http)

    async def _wake_at_events(self, follows: asyncio.Event) -> None:
        async def wake(_: Received[JobEvent]) -> None:
            for receiver in self._receivers.values():
                receiver.woken.set()

        subjects = tuple(job_events_of_kind(kind) for kind in KINDS)
        await self._bus.follow(EVENTS, JobEvent, wake, subjects=subjects, start="new", caught_up=follows)

    def _store(self, change: Change[Webhook], group: asyncio.TaskGroup, http: aiohttp.ClientSession) -> None:
        known = self._receivers.get(change.key)
        if change.value is None:
            if known is not None:
                del self._receivers[change.key]
                if known.task is not None:
                    known.task.cancel()
        elif known is not None:
            known.store(change.value, change.revision)
        else:
            receiver = _Receiver(change.value, change.revision)
            self._receivers[change.key] = receiver
            receiver.task = group.create_task(self._serve(receiver, http))

    async def _serve(self, receiver: _Receiver, http: aiohttp.ClientSession) -> None:
        """Deliver to one receiver for as long as it exists."""
        while True:
            receiver.woken.clear()
            try:
                seconds = await self._step(receiver, http)
            except ConflictError:  # another monitor was first, or the webhook is gone: the watch says which
                seconds = None
            except ResileError as error:
                logger.warning("webhook %s: %s", receiver.webhook.id, error)
                seconds = TROUBLE_SECONDS
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await receiver.woken.wait()

    async def _step(self, receiver: _Receiver, http: aiohttp.ClientSession) -> float | None:
        """Attempt what is due; return in how many seconds to look again, None: not before it is woken."""
        webhook, revision = receiver.webhook, receiver.revision  # what is decided below is about these
        event = await self._next(webhook)
        if event is None:
            return None
        unchanged = time.monotonic() - receiver.changed_at
        now = datetime.now(UTC)
        wait = seconds_to_wait(webhook, by=self._name, pace=self._pace, now=now, unchanged_seconds=unchanged)
        if wait > 0:
            return wait
        claim = claimed(webhook, by=self._name, now=now)
        revision = await self._bucket.update(claim.id, claim, revision=revision)
        receiver.store(claim, revision)
        sent = delivery(claim, event.message, now=now, trace_url=url_of(event.trace, self._trace_url))
        error = await _post(http, claim.url, sent)
        if error:
            logger.info("webhook %s: attempt %d failed: %s", claim.id, claim.attempts, error)
        assert event.sequence is not None
        done = settled(claim, sequence=event.sequence, error=error, pace=self._pace, now=datetime.now(UTC))
        receiver.store(done, await self._bucket.update(done.id, done, revision=revision))
        return 0.0

    async def _next(self, webhook: Webhook) -> Received[JobEvent] | None:
        """Return the first event that the receiver asked for and has not been sent yet."""
        if await self._first_stored(webhook) is None:
            return None
        return await self._first_stored(webhook)  # an earlier event may have been stored after its kind was read

    async def _first_stored(self, webhook: Webhook) -> Received[JobEvent] | None:
        """Read one kind after the other, and return the first event that was found."""
        found = []
        for kind in webhook.events:
            reader = self._bus.read_stream(EVENTS, JobEvent, subject=job_events_of_kind(kind))
            if event := await reader.first_after(webhook.after):
                found.append(event)
        return min(found, key=lambda event: event.sequence or 0, default=None)


async def _post(http: aiohttp.ClientSession, url: str, sent: Delivery) -> str:
    """Send once; return what went wrong, nothing if the receiver accepted it. Redirects are not followed."""
    options: dict[str, Any] = {"data": sent.body, "headers": sent.headers, "allow_redirects": False}
    try:
        async with http.post(url, **options) as answer:
            if 200 <= answer.status < 300:
                return ""
            where = " (redirects are not followed)" if 300 <= answer.status < 400 else ""
            return f"it answered {answer.status}{where}"
    except TimeoutError:
        return "it did not answer in time"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
