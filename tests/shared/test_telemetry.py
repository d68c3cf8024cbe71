import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

import orjson
import pytest

from resile_shared.errors import UsageError
from resile_shared.telemetry.exporters import Exports
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


@pytest.mark.parametrize(
    ("variables", "are_exported"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_spans_are_exported_where_the_standard_variables_say(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], *, are_exported: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    processor = Exports("test").spans()
    assert (processor is not None) == are_exported
    if processor is not None:
        processor.shutdown()


@pytest.mark.parametrize(("protocol", "collector"), [("grpc", collecting_by_grpc), ("http/protobuf", collecting)])
def test_spans_are_exported_with_the_protocol_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, protocol: str, collector: Callable[[], AbstractContextManager[Collector]]
) -> None:
    with collector() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        exported = Exports("test").spans()
        assert exported is not None
        provider = set_up_tracing("test", processors=(exported,))
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
        Exports("test").spans()
