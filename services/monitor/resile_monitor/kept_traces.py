"""The newest traces of changes, as services send them: bounded in number and size, and forgotten with the process.

Spans may arrive in any order, late, or never. The trace that has gone longest without a new span is dropped first.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from resile_shared.http.api import TraceSpan, TraceView
from resile_shared.messages.spans import Span, Spans
from resile_shared.telemetry.span_queue import CHANGE

MAX_TRACES = 2000
MAX_BYTES = 48 << 20
MAX_SPANS = 3000
"""The most spans that are kept of one trace."""
_SPAN_BYTES = 1000
"""Memory that a span takes, in bytes, apart from its events and texts."""
_EVENT_BYTES = 500


@dataclass
class Trace:
    """The spans of one trace, by their ids."""

    spans: dict[str, tuple[str, Span]] = field(default_factory=dict)
    """Spans by id, each with the service that sent it."""
    num_bytes: int = 0
    num_dropped: int = 0

    def of_job(self, job: str) -> list[Span]:
        """Return the spans that are about ``job``, in the order in which they began."""
        return sorted((span for _, span in self.spans.values() if span.job == job), key=lambda span: span.begin)


class Traces:
    """All traces that are kept."""

    def __init__(self) -> None:
        self._traces: OrderedDict[str, Trace] = OrderedDict()
        self._num_bytes = 0

    def add(self, message: Spans) -> None:
        """Keep the spans of a message."""
        for span in message.spans:
            self._add(message.service, span)
        while len(self._traces) > MAX_TRACES or self._num_bytes > MAX_BYTES:
            _, oldest = self._traces.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def _add(self, service: str, span: Span) -> None:
        name = str(span.attributes.get(CHANGE, span.trace))  # what came before a change is shown with it
        trace = self._traces.setdefault(name, Trace())
        self._traces.move_to_end(name)
        if span.id in trace.spans:
            return
        if len(trace.spans) >= MAX_SPANS:
            trace.num_dropped += 1
            return
        num_bytes = _size(span)
        trace.spans[span.id] = service, span
        trace.num_bytes += num_bytes
        self._num_bytes += num_bytes

    def get(self, trace: str) -> Trace | None:
        """Return a trace; None if it is not kept."""
        return self._traces.get(trace)

    def first(self, name: str) -> Span | None:
        """Return the span that a trace began with; None if it is not kept."""
        trace = self._traces.get(name)
        of_change = [span for _, span in trace.spans.values() if CHANGE not in span.attributes] if trace else []
        roots = [span for span in of_change if span.parent not in trace.spans] if trace else []
        return min(roots, key=lambda span: (span.parent is not None, span.begin), default=None)

    def checkpoints(self, job: str) -> Iterator[tuple[str, Span]]:
        """Yield the traces that began with a checkpoint of ``job``, and that span."""
        for name, trace in self._traces.items():
            for _, span in trace.spans.values():
                if span.name == "checkpoint" and span.parent is None and span.job == job:
                    yield name, span

    def view(self, name: str) -> TraceView | None:
        """Return a trace as it is shown."""
        trace = self._traces.get(name)
        if trace is None:
            return None
        spans = sorted(trace.spans.values(), key=lambda item: (item[1].begin, -item[1].end))
        return TraceView(
            id=name,
            spans=tuple(
                _view(service, span, parent=span.parent if span.parent in trace.spans else None)
                for service, span in spans
            ),
            dropped=trace.num_dropped,
        )


def _size(span: Span) -> int:
    """Return about how much memory a span takes."""
    texts = [span.name, span.error or "", *span.links, *map(str, span.attributes.items())]
    for event in span.events:
        texts += [event.name, *map(str, event.attributes.items())]
    return _SPAN_BYTES + _EVENT_BYTES * len(span.events) + sum(map(len, texts))


def _view(service: str, span: Span, *, parent: str | None) -> TraceSpan:
    return TraceSpan(
        id=span.id,
        parent=parent,
        name=span.name,
        service=service,
        begin=span.begin / 1e6,
        seconds=max(0, span.end - span.begin) / 1e6,
        attributes=span.attributes,
        events=tuple(event.model_dump() for event in span.events),
        links=span.links,
        error=span.error,
    )
