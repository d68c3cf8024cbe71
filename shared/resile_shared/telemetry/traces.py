"""Traces and logs: OpenTelemetry set-up, spans in one line, and logs that carry trace ids.

Spans of changes are recorded in any case, for the page; what is repeated several times a second is not. Trace ids
always travel. Attributes follow the semantic conventions of OpenTelemetry; those of Resile begin with ``resile.``.
"""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Literal

import orjson
from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.propagate import extract, inject
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes

from ..bus.subjects import COMMAND_PREFIX, template_of
from ..messages.message import timestamp
from .exporters import Signal, is_exported
from .resource import resource_of
from .span_queue import CHANGE, ITERATION, is_of_change
from .span_times import KEY, SpanClock, begin_of, beginning, state_of
from .trace_ids import TraceIds, chosen_in

_tracer = trace.get_tracer("resile")
_clock = SpanClock()
Value = str | int | float | bool


class _Changes(Sampler):
    """Records the traces of changes alone; with a collector also the iterations that are sampled."""

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """Decide by the name of the first span."""
        parent = trace.get_current_span(parent_context).get_span_context()
        if parent.is_valid:
            is_wanted = parent.trace_flags.sampled
        else:
            is_wanted = is_of_change(name) or (name == ITERATION and is_exported(Signal.TRACES))
        decision = Decision.RECORD_AND_SAMPLE if is_wanted else Decision.DROP
        return SamplingResult(decision, attributes, state_of(parent))

    def get_description(self) -> str:
        """Return a name."""
        return "Changes"


def set_up_tracing(service: str, *, host: str = "", processors: Sequence[SpanProcessor] = ()) -> TracerProvider:
    """Have the spans of this process go to ``processors``.

    ``host`` is that of the pool which the service belongs to, if it does.
    """
    provider = TracerProvider(
        sampler=_Changes(),
        id_generator=TraceIds(),
        resource=resource_of(service, host=host),
    )
    for processor in processors:
        provider.add_span_processor(processor)
    trace.set_tracer_provider(provider)
    return provider


def attributes_of(attributes: Mapping[str, Value]) -> dict[str, Value]:
    """Return attributes by their full names: those without a dot are Resile's."""
    return {name if "." in name else f"resile.{name}": value for name, value in attributes.items()}


def _start(
    name: str,
    context: Context | None,
    attributes: Mapping[str, Value],
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    begun: int | None = None,
    links: Sequence[Link] = (),
) -> trace.Span:
    """Begin a span now, or at ``begun``, but not before its parent."""
    parent = trace.get_current_span(context).get_span_context()
    if parent.is_remote:
        _clock.follow(parent)
    begin = max(_clock.now() if begun is None else begun, begin_of(parent))
    with beginning(begin), chosen_in(context):
        found = attributes_of(attributes)
        return _tracer.start_span(name, context, kind, found, links, begin)


@contextmanager
def _around(span: trace.Span) -> Iterator[trace.Span]:
    """Put ``span`` around the block; an exception is recorded in it and goes on."""
    try:
        with trace.use_span(span):
            yield span
    finally:
        end(span)


@contextmanager
def traced(
    name: str,
    attributes: Mapping[str, Value] | None = None,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    links: Sequence[Link] = (),
    **own: Value,
) -> Iterator[trace.Span]:
    """Put a span around the block; an exception is recorded in it and goes on."""
    with _around(_start(name, None, {**(attributes or {}), **own}, kind=kind, links=links)) as span:
        yield span


def begin(
    name: str,
    context: Context | None = None,
    attributes: Mapping[str, Value] | None = None,
    *,
    begun: float | None = None,
    links: Sequence[Link] = (),
    **own: Value,
) -> trace.Span:
    """Begin a span that is ended later, by `end`; in ``context``, or else in the current one.

    ``begun``: in seconds since the epoch by the clock of this machine, if not now.
    """
    start = None if begun is None else _clock.at(begun)
    return _start(name, context, {**(attributes or {}), **own}, begun=start, links=links)


def end(span: trace.Span, *, ended: float | None = None) -> None:
    """End a span; ``ended``: in seconds since the epoch by the clock of this machine, if not now."""
    at = _clock.now() if ended is None else _clock.at(ended)
    span.end(max(at, begin_of(span.get_span_context())))


def began(context: Context) -> float:
    """When the span of ``context`` began, in seconds since the epoch by the clock of this machine; 0: not known."""
    begin = begin_of(trace.get_current_span(context).get_span_context())
    return (begin - _clock.at(0)) / 1e9 if begin else 0.0


def before(context: Context) -> tuple[tuple[Link, ...], dict[str, Value]]:
    """Return the link and the attribute of a span that came before the change of ``context``, and led to it or not.

    It cannot hang below what began after it, so it is a trace of its own.
    """
    return (link_to(context),), {CHANGE: trace.format_trace_id(trace_id(context))}


def trace_id(context: Context | None = None) -> int:
    """Return the id of the trace of ``context``, or else of the current one; 0 if there is none."""
    return trace.get_current_span(context).get_span_context().trace_id


def link_to(context: Context) -> Link:
    """Return a link to the span of ``context``."""
    return Link(trace.get_current_span(context).get_span_context())


def in_span(span: trace.Span) -> Context:
    """Return the context of what ``span`` leads to."""
    return trace.set_span_in_context(span, Context())


def fail(span: trace.Span, kind: str, reason: str) -> None:
    """Give ``span`` the status of an error: of a ``kind`` from a short list, and with the ``reason`` in words."""
    span.set_attribute("error.type", kind)
    span.set_status(trace.StatusCode.ERROR, reason)


def is_recorded() -> bool:
    """Whether the current trace is recorded."""
    return trace.get_current_span().get_span_context().trace_flags.sampled


def message_attributes(subject: str, operation: Literal["publish", "request", "process"]) -> dict[str, Value]:
    """Return the attributes of a span that sends or handles a message."""
    template = template_of(subject)
    return {
        "messaging.system": "nats",
        "messaging.destination.name": subject,
        **({"messaging.destination.template": template.text} if template.text != subject else {}),
        "messaging.operation.name": operation,
        "messaging.operation.type": "process" if operation == "process" else "send",
        **template.ids,
    }


@contextmanager
def publishing(verb: Literal["publish", "ask"], subject: str) -> Iterator[trace.Span]:
    """Put a span around the sending of a message."""
    kind, operation = (SpanKind.CLIENT, "request") if verb == "ask" else (SpanKind.PRODUCER, "publish")
    attributes = message_attributes(subject, operation)  # type: ignore[arg-type]
    with traced(f"{verb} {template_of(subject).text}", attributes, kind=kind) as span:
        yield span


@contextmanager
def handling(verb: Literal["handle", "answer"], subject: str, headers: Mapping[str, str] | None) -> Iterator[None]:
    """Put a span around the handling of a message, as a child of what sent it; systems outside send commands, too."""
    if headers and subject.startswith(COMMAND_PREFIX):
        headers = of_caller(headers)
    attributes = message_attributes(subject, "process")
    kind = SpanKind.SERVER if verb == "answer" else SpanKind.CONSUMER
    with continued(f"{verb} {template_of(subject).text}", headers, attributes, kind=kind):
        yield


@contextmanager
def continued(
    name: str,
    headers: Mapping[str, str] | None,
    attributes: Mapping[str, Value] | None = None,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
) -> Iterator[trace.Span]:
    """Put a span around what a message or a request leads to, as a child of what sent it."""
    with _around(_start(name, extract(headers or {}), attributes or {}, kind=kind)) as span:
        yield span


def of_caller(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a request from outside the pool, with its trace marked to be recorded.

    Whoever called may not record it: the page shows each change all the same.
    """
    named = {name.lower(): value for name, value in headers.items() if name.lower() in ("traceparent", "tracestate")}
    if (parent := named.get("traceparent", "")).endswith("-00"):
        named["traceparent"] = f"{parent[:-2]}01"
    entries = [entry.strip() for entry in named.pop("tracestate", "").split(",")]
    others = [entry for entry in entries if entry and not entry.startswith(f"{KEY}=")]  # ours sets the clock
    return named | ({"tracestate": ",".join(others)} if others else {})


def environment_of(span: trace.Span) -> dict[str, str]:
    """Return the variables by which a program that is started in ``span`` continues its trace."""
    headers: dict[str, str] = {}
    inject(headers, in_span(span))
    return {name.upper(): value for name, value in headers.items()}


def carries_trace(headers: Mapping[str, str] | None) -> bool:
    """Whether a message belongs to a trace: state that is repeated every second needs no spans."""
    return "traceparent" in (headers or {})


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
