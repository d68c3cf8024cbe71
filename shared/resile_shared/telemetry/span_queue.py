"""Sends the spans of changes over the bus, where monitors keep the newest: for waterfalls without a collector.

The queue is bounded, nothing waits for it, and messages may be lost: tracing never holds a change up.
"""

import asyncio
import math
import os
import secrets
from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id

from ..bus.subjects import trace
from ..messages.message import MAX_INTEGER
from ..messages.spans import MAX_ATTRIBUTES, MAX_LINKS, MAX_SPAN_EVENTS, MAX_SPANS, Span, SpanEvent, Spans

if TYPE_CHECKING:
    from ..bus.client import Bus

MAX_WAITING = 4000
SEND_SECONDS = 0.25
ITERATION = "sampled iteration"
"""The name of spans that belong to no change."""
CHANGE = "resile.change"
"""The attribute of a span that came before a change: the id of the change's trace, where it is shown."""
_PROGRESS = ".progress"


def is_of_change(name: str) -> bool:
    """Whether a trace that begins with a span of that name is about a change, not about what is repeated anyway."""
    return name != ITERATION and not name.endswith(_PROGRESS)


class SpanQueue(SpanProcessor):
    """Keeps spans that have ended until they are sent; the oldest are dropped and counted."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._process = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._waiting: deque[ReadableSpan] = deque()
        self._num_dropped = 0
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span."""
        if not is_of_change(span.name):
            return
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            self._num_dropped += 1
        self._waiting.append(span)
        if not self._changed.is_set() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._changed.set)

    async def run(self, bus: "Bus") -> None:
        """Send what is queued, in batches, forever."""
        while True:
            await self._changed.wait()
            await asyncio.sleep(SEND_SECONDS)
            self._changed.clear()
            await self.flush(bus)

    async def flush(self, bus: "Bus") -> None:
        """Send what is queued now."""
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(MAX_SPANS, len(self._waiting)))]
            message = Spans(
                service=self._service,
                process=self._process,
                spans=tuple(_encoded(span) for span in batch),
                dropped=self._num_dropped,
            )
            if not await bus.send(trace(self._service), message):
                self._num_dropped += len(batch)


def _encoded(span: ReadableSpan) -> Span:
    context = span.get_span_context()
    assert context is not None
    is_failed = span.status.status_code is StatusCode.ERROR
    return Span(
        trace=format_trace_id(context.trace_id),
        id=format_span_id(context.span_id),
        parent=format_span_id(span.parent.span_id) if span.parent else None,
        name=span.name,
        begin=(span.start_time or 0) // 1000,
        end=(span.end_time or 0) // 1000,
        attributes=_attributes(span.attributes),
        events=tuple(
            SpanEvent(name=event.name, time=event.timestamp // 1000, attributes=_attributes(event.attributes))
            for event in span.events[:MAX_SPAN_EVENTS]
        ),
        links=tuple(format_trace_id(link.context.trace_id) for link in span.links[:MAX_LINKS]),
        error=(span.status.description or "failed") if is_failed else None,
    )


def _attributes(attributes: Mapping[str, object] | None) -> dict[str, bool | int | float | str]:
    return {name: _plain(value) for name, value in islice((attributes or {}).items(), MAX_ATTRIBUTES)}


def _plain(value: object) -> bool | int | float | str:
    """Return a value as messages hold it: all others, and numbers that JSON cannot express, as text."""
    match value:
        case bool() | str():
            return value
        case int() if abs(value) <= MAX_INTEGER:
            return value
        case float() if math.isfinite(value):
            return value
        case list() | tuple():
            return ", ".join(map(str, value))
        case _:
            return str(value)
