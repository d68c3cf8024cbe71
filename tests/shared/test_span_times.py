"""One clock for the spans of all services: who is behind follows, and nobody begins before its parent."""

import time

import pytest
from opentelemetry.context import Context
from opentelemetry.propagate import inject
from opentelemetry.sdk.trace import Span
from opentelemetry.trace import SpanContext, TraceFlags, TraceState

from resile_shared.telemetry import traces
from resile_shared.telemetry.span_times import MAX_BEHIND_SECONDS, SpanClock, begin_of, beginning, state_of
from resile_shared.telemetry.traces import began, begin, context_of, end, in_span, of_caller, set_up_tracing


def remote(begin: float, *others: tuple[str, str]) -> SpanContext:
    state = TraceState([*others, ("resile", str(round(begin * 1e6)))])
    return SpanContext(1, 2, is_remote=True, trace_flags=TraceFlags(1), trace_state=state)


def test_a_clock_that_is_behind_follows_and_stays_ahead() -> None:
    clock = SpanClock()
    clock.follow(remote(time.time() + 5))
    clock.follow(remote(time.time() + 3))
    assert 4.9 < clock.now() / 1e9 - time.time() < 5.1
    assert 4.9 < clock.at(1000.0) / 1e9 - 1000.0 < 5.1


def test_a_clock_that_is_set_right_is_not_ahead_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SpanClock()
    clock.follow(remote(time.time() + 50))
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + 50 * 10**9)
    assert abs(clock.now() / 1e9 - time.time() - 50) < 0.5
    monkeypatch.setattr(time, "time_ns", lambda: real() + 80 * 10**9)
    assert abs(clock.now() / 1e9 - time.time() - 80) < 0.5


@pytest.mark.parametrize("context", [remote(0.0), SpanContext(1, 2, is_remote=True), remote(time.time() - 5)])
def test_a_context_that_is_not_later_changes_nothing(context: SpanContext) -> None:
    clock = SpanClock()
    clock.follow(context)
    assert abs(clock.now() / 1e9 - time.time()) < 0.1


def test_a_clock_that_is_out_by_far_is_not_followed() -> None:
    clock = SpanClock()
    clock.follow(remote(time.time() + MAX_BEHIND_SECONDS + 5))
    assert abs(clock.now() / 1e9 - time.time()) < 0.1


@pytest.mark.parametrize("value", ["", "x", "-1", "1" * 17, "٣"])
def test_a_begin_that_is_no_number_is_not_known(value: str) -> None:
    assert begin_of(SpanContext(1, 2, is_remote=True, trace_state=TraceState([("resile", value)]))) == 0


def test_what_others_added_to_the_state_stays() -> None:
    with beginning(1_700_000_000_000_000_001):
        state = state_of(remote(5.0, ("vendor", "1")))
    assert list(state.items()) == [("resile", "1700000000000001"), ("vendor", "1")]


def test_a_span_begins_with_its_parent_at_the_earliest_and_ends_with_its_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_tracer", set_up_tracing("test").get_tracer("test"))
    monkeypatch.setattr(traces, "_clock", SpanClock())
    parent = begin("cause", Context())
    child = begin("effect", in_span(parent), begun=began(in_span(parent)) - 60)
    end(child, ended=began(in_span(parent)) - 50)
    assert isinstance(parent, Span)
    assert isinstance(child, Span)
    assert 0 <= (child.start_time or 0) - (parent.start_time or 0) < 1000
    assert child.end_time == child.start_time


def test_the_begin_travels_with_the_context_and_strangers_do_not_set_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_tracer", set_up_tracing("test").get_tracer("test"))
    headers: dict[str, str] = {}
    span = begin("cause", Context())
    inject(headers, in_span(span))
    assert abs(began(context_of(headers)) - began(in_span(span))) < 1e-5
    headers["tracestate"] += " , vendor=1"
    assert of_caller(headers) == {"traceparent": headers["traceparent"], "tracestate": "vendor=1"}
