"""Handlers for webhooks: list, add, remove."""

import base64
import hashlib
import secrets
from datetime import UTC, datetime

from aiohttp import web

from resile_shared.bus.buckets import ConflictError, Entry
from resile_shared.bus.subjects import EVENTS, WEBHOOKS, InvalidSubject
from resile_shared.http.api import Empty, NewWebhook, WebhookCreated, WebhookList, WebhookView
from resile_shared.messages.jobs import JobEvent
from resile_shared.messages.webhooks import MAX_WEBHOOKS, SECRET_PREFIX, Webhook

from .operations import Operation
from .pool import Pool, bus_timeout
from .problems import ProblemError
from .requests import answer, read_body, read_key

NO_ANSWER = "the bus does not respond: try again"
_NUM_TRIES = 5


class Webhooks:
    """The handlers below ``/v1/webhooks``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @Operation("get", "/v1/webhooks", "All webhooks", WebhookList)
    async def _list(self, _: web.Request) -> web.Response:
        found = sorted((await self._entries()).values(), key=lambda entry: (entry.value.created, entry.key))
        return answer(
            WebhookList(webhooks=tuple(WebhookView.model_validate(entry.value.model_dump()) for entry in found))
        )

    @Operation("post", "/v1/webhooks", "Add a webhook", WebhookCreated, status=201, body=NewWebhook)
    async def _add(self, request: web.Request) -> web.Response:
        body = await read_body(request, NewWebhook)
        key = read_key(request)
        id_ = f"hook-{hashlib.sha256(key.encode()).hexdigest()[:12] if key else secrets.token_hex(6)}"
        present = await self._entries()
        if id_ not in present and len(present) >= MAX_WEBHOOKS:
            raise ProblemError("conflict", f"there are {MAX_WEBHOOKS} webhooks already: remove one first")
        async with bus_timeout(NO_ANSWER):
            webhook = Webhook(
                id=id_,
                url=body.url,
                secret=body.secret or SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode(),
                events=tuple(dict.fromkeys(body.events)),
                created=datetime.now(UTC),
                after=await self._pool.bus.read_stream(EVENTS, JobEvent).last(),
            )
            stored = await self._create(webhook, is_given=body.secret is not None)
        return answer(WebhookCreated.model_validate(stored.model_dump()), status=201)

    async def _create(self, webhook: Webhook, *, is_given: bool) -> Webhook:
        """Store it; the same request with the same key finds what the first one stored."""
        bucket = self._pool.bus.bucket(WEBHOOKS)
        try:
            await bucket.create(webhook.id, webhook)
        except ConflictError:
            entry = await bucket.get(webhook.id)
            if entry is None:
                raise ProblemError("unavailable", "the webhook was removed at the same moment: try again") from None
            same = (entry.value.url, entry.value.events) == (webhook.url, webhook.events)
            if not same or (is_given and entry.value.secret != webhook.secret):
                raise ProblemError(
                    "conflict", "another request had the same Idempotency-Key: use a new one for each webhook"
                ) from None
            return entry.value
        return webhook

    @Operation("delete", "/v1/webhooks/{webhook}", "Remove a webhook", Empty)
    async def _remove(self, request: web.Request) -> web.Response:
        id_, key = request.match_info["webhook"], read_key(request)
        message_id = f"webhook.delete:{id_}:{key}" if key else ""
        bucket = self._pool.bus.bucket(WEBHOOKS)
        async with bus_timeout(NO_ANSWER):
            for _ in range(_NUM_TRIES):  # a delivery may change the record meanwhile
                try:
                    entry = await bucket.get(id_)
                    if entry is None and key and await bucket.was_deleted(id_, message_id=message_id):
                        return answer(Empty())
                except InvalidSubject:
                    entry = None
                if entry is None:
                    raise ProblemError(
                        "unknown",
                        f"there is no webhook {id_[:64]}: GET /v1/webhooks (`resile webhook list`) lists them",
                    )
                try:
                    await bucket.delete(id_, revision=entry.revision, message_id=message_id)
                    return answer(Empty())
                except ConflictError:
                    continue
        raise ProblemError("unavailable", f"webhook {id_} was changed by other requests at the same time: try again")

    async def _entries(self) -> dict[str, Entry[Webhook]]:
        async with bus_timeout(NO_ANSWER):
            return await self._pool.bus.bucket(WEBHOOKS).entries()
