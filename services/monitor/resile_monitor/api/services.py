"""Requests to services: they go over the bus to one replica, and to another one if they had no effect."""

import asyncio
import time

from aiohttp import web
from nats.aio.msg import Msg
from pydantic import BaseModel, ConfigDict, Field

from resile_shared.bus import subjects
from resile_shared.calls import JSON, MAX_CALL_BYTES, RETRIED, CallHead, ReplyHead
from resile_shared.messages.jobs import JobRecord

from .operations import Operation
from .pool import Pool
from .problems import ProblemError
from .requests import body_time, read_query

CALLS = "/v1/services/{service}/{method}"
MAX_SECONDS = 3600.0
CHOICES = (0.0, 0.0, 0.0, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.032)
"""A replica that the bus chooses at random is asked whether it is idle, again after each of these pauses in seconds;
only then a request waits in one that computes others."""
PAUSE_SECONDS = 0.05
"""Between two attempts while no replica takes a request."""


class CallQuery(BaseModel):
    """How long a request may take."""

    model_config = ConfigDict(extra="forbid")

    seconds: float = Field(default=30.0, gt=0, le=MAX_SECONDS, description="after this time, nobody waits for it")


class Services:
    """The handlers of ``/v1/services``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @Operation("post", CALLS, "Call a method of a service", JSON, body=JSON, query=CallQuery, is_keyed=False)
    async def _call(self, request: web.Request) -> web.Response:
        name, method = request.match_info["service"], request.match_info["method"]
        deadline = time.monotonic() + read_query(request, CallQuery).seconds
        async with body_time():
            body = await request.read()
        if len(body) > MAX_CALL_BYTES:
            raise ProblemError("too large", f"the arguments have {len(body)} bytes, and at most {MAX_CALL_BYTES} fit")
        num_busy = 0
        while (left := deadline - time.monotonic()) > 0:
            job = self._service(name)
            may_wait = num_busy >= len(CHOICES)
            reply = await self._ask(job.job, CallHead(method=method, seconds=left, may_wait=may_wait), body)
            head = ReplyHead.of(reply.headers) if reply is not None else None
            if head is not None and head.status in RETRIED and not may_wait:
                await asyncio.sleep(CHOICES[num_busy])
                num_busy += 1
                continue
            if head is None or head.status in RETRIED or (head.status == "lost" and head.is_idempotent):
                await asyncio.sleep(min(PAUSE_SECONDS, max(deadline - time.monotonic(), 0.0)))
                continue
            assert reply is not None
            if head.status == "ok":
                return web.Response(body=reply.data, content_type=JSON)
            raise ProblemError(head.status, f"{name}.{method}: {reply.data.decode(errors='replace')}")
        raise ProblemError("late", f"{name}.{method}: no replica answered in time")

    async def _ask(self, job: str, head: CallHead, body: bytes) -> Msg | None:
        """Ask one replica; None if there is none, or if it does not answer in time."""
        return await self._pool.bus.connection.request_once(
            subjects.call(job), body, headers=head.headers(), seconds=head.seconds
        )

    def _service(self, name: str) -> JobRecord:
        """Return the newest job of a service that has not ended. Raises ProblemError."""
        found = [
            record
            for record in self._pool.projection.records()
            if record.spec.service and name in (record.spec.name, record.job) and not record.state.is_final
        ]
        if not found:
            raise ProblemError("unknown", f"there is no service {name}: `resile serve` starts one")
        return max(found, key=lambda record: record.submitted)
