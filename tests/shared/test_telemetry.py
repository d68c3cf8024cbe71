import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

import orjson
import pytest
from opentelemetry.sdk.trace import TracerProvider

from resile_shared.errors import UsageError
from resile_shared.telemetry.traces import JsonFormatter, PlainFormatter, set_up_tracing, traced
from resile_testing.collector import Collector, collecting, collecting_by_grpc


def line(formatter: logging.Formatter, message: str = "a message") -> str:
    try:
        raise ValueError("on purpose")
    except ValueError:
        record = logging.LogRecord("resile.test", logging.INFO, __file__, 1, message, None, sys.exc_info())
    return formatter.format(record)


def test_log_lines_carry_the_trace() -> None:
    set_up_tracing("test")
    with traced("work") as span:
        fields = orjson.loads(line(JsonFormatter("registry")))
        plain = line(PlainFormatter("registry"))
    trace_id = f"{span.get_span_context().trace_id:032x}"
    assert fields["trace_id"] == trace_id
    assert trace_id in plain
    assert (fields["service"], fields["level"], fields["message"]) == ("registry", "info", "a message")
    assert "ValueError: on purpose" in fields["exception"]
    assert "trace_id" not in orjson.loads(line(JsonFormatter("registry")))


def test_a_json_line_is_one_line() -> None:
    assert "\n" not in line(JsonFormatter("registry"), "two\nlines")


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_spans_are_exported_where_the_standard_variable_says(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def num_processors(provider: TracerProvider) -> int:
        count = len(provider._active_span_processor._span_processors)
        provider.shutdown()
        return count

    assert num_processors(set_up_tracing("test")) == 0
    monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert num_processors(set_up_tracing("test")) == 1


@pytest.mark.parametrize(("protocol", "collector"), [("grpc", collecting_by_grpc), ("http/protobuf", collecting)])
def test_spans_are_exported_with_the_protocol_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, protocol: str, collector: Callable[[], AbstractContextManager[Collector]]
) -> None:
    with collector() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        provider = set_up_tracing("test")
        tracer = provider.get_tracer("test")
        with tracer.start_as_current_span("cause"), tracer.start_as_current_span("effect"):
            pass
        with tracer.start_as_current_span("publish resile.report.{job}.progress"):
            pass
        provider.shutdown()
    (spans,) = running.traces.values()
    assert [(span.name, span.service, bool(span.parent)) for span in spans] == [
        ("effect", "test", True),
        ("cause", "test", False),
    ]
    assert running.orphans() == []


def test_an_unknown_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "smoke")
    with pytest.raises(UsageError, match="OTEL_EXPORTER_OTLP_PROTOCOL=smoke: must be grpc or http/protobuf"):
        set_up_tracing("test")
