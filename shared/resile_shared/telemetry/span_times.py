"""The times of spans, by one clock for the whole pool: no span begins before its parent.

A span's context carries the time of its begin (``tracestate: resile=MICROSECONDS``) to whatever continues it, on
whichever host. Who gets a context that began later than its own clock says has a clock that is behind, and is ahead by
the difference from then on, as with a hybrid logical clock (Kulkarni et al., 2014). So spans are at the time of the
clock that is furthest ahead; those of a clock that is out by more than `MAX_BEHIND_SECONDS` are moved one by one.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from opentelemetry.trace import SpanContext, TraceState

KEY = "resile"
MAX_BEHIND_SECONDS = 60.0
_MAX_OTHERS = 31
"""A trace state has at most 32 entries."""
_MAX_DIGITS = 16
"""Of microseconds since the epoch: until the year 2286, and less than 64 bits in nanoseconds."""
_beginning: ContextVar[int] = ContextVar("resile_span_begin")


class SpanClock:
    """The clock of this process, in nanoseconds since the epoch, which follows those that are ahead of it."""

    def __init__(self) -> None:
        self._added = 0
        self._offset = _offset_ns()

    @property
    def _ahead(self) -> int:
        """What is added; less if the clock of this machine was set forward since it was found to be behind."""
        return max(0, self._added - max(0, _offset_ns() - self._offset))

    def now(self) -> int:
        """Return the time."""
        return time.time_ns() + self._ahead

    def at(self, seconds: float) -> int:
        """Return the time at which the clock of this machine was at ``seconds`` since the epoch."""
        return round(seconds * 1e9) + self._ahead

    def follow(self, parent: SpanContext) -> None:
        """Learn from a context of another process, which is never from the future."""
        behind = begin_of(parent) - self.now()
        if 0 < behind <= MAX_BEHIND_SECONDS * 1e9:
            self._added, self._offset = self._ahead + behind, _offset_ns()


def begin_of(context: SpanContext) -> int:
    """Return when the span of ``context`` began, in nanoseconds; 0 if that is not known."""
    value = context.trace_state.get(KEY) or ""
    return int(value) * 1000 if value.isascii() and value.isdecimal() and len(value) <= _MAX_DIGITS else 0


def _offset_ns() -> int:
    """What this machine's clock is ahead of one that nobody sets."""
    return time.time_ns() - time.monotonic_ns()


@contextmanager
def beginning(nanoseconds: int) -> Iterator[None]:
    """Have the span that is begun in the block carry its begin: see `state_of`."""
    token = _beginning.set(nanoseconds)
    try:
        yield
    finally:
        _beginning.reset(token)


def state_of(parent: SpanContext) -> TraceState:
    """Return the trace state of the span that is being begun, below ``parent``: what others added stays."""
    others = [(key, value) for key, value in parent.trace_state.items() if key != KEY][:_MAX_OTHERS]
    begin = _beginning.get(0)
    return TraceState([(KEY, str(-(-begin // 1000))), *others] if begin else others)
