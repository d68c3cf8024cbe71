"""Spans of changes, which services send for the waterfalls of monitors. They may be lost; messages count how many."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from .message import MAX_INTEGER, Count, Id, Message

MAX_SPANS = 200
"""The maximum number of spans in one message."""
MAX_ATTRIBUTES = 32
MAX_SPAN_EVENTS = 16
MAX_LINKS = 8
_MAX_NAME = 200
_MAX_VALUE = 500


def _cut_to(length: int) -> BeforeValidator:
    return BeforeValidator(lambda value: value[:length] if isinstance(value, str) else value)


Name = Annotated[str, _cut_to(_MAX_NAME), Field(max_length=_MAX_NAME)]
Value = Annotated[str, _cut_to(_MAX_VALUE), Field(max_length=_MAX_VALUE)]
_Integer = Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)]
_Number = Annotated[float, Field(allow_inf_nan=False)]
Attributes = Annotated[dict[Name, bool | _Integer | _Number | Value], Field(max_length=MAX_ATTRIBUTES)]
TraceId = Annotated[str, Field(max_length=32, pattern=r"^[0-9a-f]{32}$")]
SpanId = Annotated[str, Field(max_length=16, pattern=r"^[0-9a-f]{16}$")]
Microseconds = Annotated[Count, Field(description="microseconds since the epoch")]


class SpanEvent(Message):
    """A moment within a span."""

    name: Name
    time: Microseconds
    attributes: Attributes = Field(default_factory=dict)


class Span(Message):
    """One step of a change, as OpenTelemetry defines it."""

    trace: TraceId
    id: SpanId
    parent: SpanId | None = Field(default=None, description="null: the change began with it")
    name: Name
    begin: Microseconds
    end: Microseconds
    attributes: Attributes = Field(default_factory=dict)
    events: tuple[SpanEvent, ...] = Field(default=(), max_length=MAX_SPAN_EVENTS)
    links: tuple[TraceId, ...] = Field(default=(), max_length=MAX_LINKS, description="related traces")
    error: Value | None = Field(default=None, description="why it failed; null: it did not")

    @property
    def job(self) -> str:
        """The job that it is about; empty: none, or not known."""
        return str(self.attributes.get("resile.job", ""))


class Spans(Message):
    """Some spans that have ended in one process."""

    service: Id
    process: Id = Field(description="tells the processes of one service apart")
    spans: tuple[Span, ...] = Field(max_length=MAX_SPANS)
    dropped: Count = Field(default=0, description="spans that this process could not send since it started")
