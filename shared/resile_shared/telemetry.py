"""Traces and logs: OpenTelemetry set-up, spans in one line, and logs that carry trace ids.

Without a configured exporter a span costs next to nothing and is kept nowhere, but trace ids still travel.
"""

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Literal

import orjson
from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, DEFAULT_ON

from .messages.message import timestamp

_tracer = trace.get_tracer("resile")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def set_up_tracing(service: str, *, processors: Sequence[SpanProcessor] = ()) -> TracerProvider:
    """Have the spans of this process go to the collector that the standard variables name, and to ``processors``."""
    has_collector = any(os.environ.get(name) for name in _ENDPOINTS)
    provider = TracerProvider(
        sampler=DEFAULT_ON if has_collector or processors else ALWAYS_OFF,
        resource=Resource.create({"service.name": service}),
    )
    if has_collector:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    for processor in processors:
        provider.add_span_processor(processor)
    trace.set_tracer_provider(provider)
    return provider


@contextmanager
def traced(name: str, **attributes: str | int | float | bool) -> Iterator[trace.Span]:
    """Put a span around the block; an exception is recorded in it and goes on."""
    with _tracer.start_as_current_span(name, attributes=attributes) as span:
        yield span


def begin(name: str, context: Context | None = None, **attributes: str | int | float | bool) -> trace.Span:
    """Begin a span that something later ends, by its `end`; in ``context``, or else in the present one."""
    return _tracer.start_span(name, context=context, attributes=attributes)


@contextmanager
def continued(name: str, headers: Mapping[str, str] | None, *, always: bool = True) -> Iterator[None]:
    """Put a span around the handling of a message, as a child of what sent it.

    Unless ``always``, only for a message that carries a trace: state that is repeated every second needs no spans.
    """
    carrier = headers or {}
    if not always and "traceparent" not in carrier:
        yield
        return
    with _tracer.start_as_current_span(name, context=extract(carrier)):
        yield


def context_of(headers: Mapping[str, str]) -> Context:
    """Return the trace that headers carry, for `resumed`; an empty one without."""
    return extract(headers, context=Context())


@contextmanager
def resumed(context: Context) -> Iterator[None]:
    """Put the block into a trace that another task began: what ``get_current`` returned there."""
    token = attach(context)
    try:
        yield
    finally:
        detach(token)


def set_up_logging(service: str, *, form: Literal["json", "plain"], level: str) -> None:
    """Have all loggers write to stderr, in one form, at ``level`` and above."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if form == "json" else PlainFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("nats").setLevel(logging.CRITICAL)  # the bus says itself what matters of it


def _trace_ids() -> dict[str, str]:
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": trace.format_trace_id(context.trace_id), "span_id": trace.format_span_id(context.span_id)}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, service, logger, message, trace ids, and the traceback if there is one."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields: dict[str, Any] = {
            "time": timestamp(datetime.fromtimestamp(record.created, UTC)),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_trace_ids(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(fields).decode()


class PlainFormatter(logging.Formatter):
    """A line for people: time, level, service, message, and the trace it belongs to."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, with the traceback below it if there is one."""
        time = timestamp(datetime.fromtimestamp(record.created, UTC))
        ids = _trace_ids()
        line = f"{time} {record.levelname.lower():7} {self._service}: {record.getMessage()}"
        line += f" [trace {ids['trace_id']}]" if ids else ""
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line
