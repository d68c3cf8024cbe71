import logging
import sys

import orjson
import pytest
from opentelemetry.sdk.trace import TracerProvider

from resile_shared.telemetry import JsonFormatter, PlainFormatter, set_up_tracing, traced


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
