"""Which traces are exported, by OpenTelemetry's variables ``OTEL_TRACES_SAMPLER`` and ``OTEL_TRACES_SAMPLER_ARG``.

A sampler thins what went well. Traces that begin with a failure have ids that every ratio keeps (`trace_ids.py`). Of a
trace in which something fails later, a service exports what it still has, and all that follows.
"""

import os
from collections import OrderedDict, deque

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.trace import StatusCode

from ..errors import UsageError
from .trace_ids import is_kept

MAX_WAITING = 2000
"""Spans of traces that are not exported, kept for the case that something fails in them."""
MAX_FAILED = 1000
"""Traces in which something has failed."""
_SAMPLER = "OTEL_TRACES_SAMPLER"
_RATIOS = {"always_on": 1.0, "always_off": 0.0}


def ratio() -> float:
    """Return the share of traces that are exported though nothing fails in them. Raises UsageError."""
    chosen = os.environ.get(_SAMPLER) or "always_on"
    kind = chosen.removeprefix("parentbased_")
    if kind in _RATIOS:
        return _RATIOS[kind]
    if kind != "traceidratio":
        raise UsageError(f"{_SAMPLER}={chosen}: must be always_on, always_off or traceidratio")
    text = os.environ.get(f"{_SAMPLER}_ARG") or "1"
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise UsageError(f"{_SAMPLER}_ARG={text}: must be a number from 0 to 1")
    return share


class SampledSpans(SpanProcessor):
    """Passes on the spans of a share of all traces, and of those in which something fails."""

    def __init__(self, exported: SpanProcessor, share: float) -> None:
        self._exported = exported
        self._bound = TraceIdRatioBased.get_bound_for_rate(share)
        self._waiting: deque[ReadableSpan] = deque(maxlen=MAX_WAITING)
        self._failed: OrderedDict[int, None] = OrderedDict()

    def on_end(self, span: ReadableSpan) -> None:
        """Pass a span on, or keep it until something fails in its trace."""
        trace = _trace(span)
        if span.status.status_code is StatusCode.ERROR:
            self._on_failed(trace)
        if self._is_exported(trace):
            self._exported.on_end(span)
        else:
            self._waiting.append(span)

    def shutdown(self) -> None:
        """Export what is queued."""
        self._exported.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Export what is queued now."""
        return self._exported.force_flush(timeout_millis)

    def _is_exported(self, trace: int) -> bool:
        is_sampled = trace & TraceIdRatioBased.TRACE_ID_LIMIT < self._bound
        return is_sampled or is_kept(trace) or trace in self._failed

    def _on_failed(self, trace: int) -> None:
        """Export what is still there of a trace."""
        if self._is_exported(trace):
            return
        self._failed[trace] = None
        if len(self._failed) > MAX_FAILED:
            self._failed.popitem(last=False)
        for span in list(self._waiting):
            if _trace(span) == trace:
                self._exported.on_end(span)
                self._waiting.remove(span)


def _trace(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id
