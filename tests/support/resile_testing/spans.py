"""The spans of this process, kept in memory."""

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from resile_shared.telemetry import traces
from resile_shared.telemetry.trace_ids import TraceIds


class KeptSpans:
    """All spans that have ended since this was made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._exporter, provider = InMemorySpanExporter(), TracerProvider(id_generator=TraceIds())
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        monkeypatch.setattr(traces, "_tracer", provider.get_tracer("test"))

    @property
    def ended(self) -> tuple[ReadableSpan, ...]:
        """The spans, in the order in which they ended."""
        return self._exporter.get_finished_spans()

    @property
    def names(self) -> list[str]:
        """The names of the spans, in the order in which they ended."""
        return [span.name for span in self.ended]

    @property
    def errors(self) -> list[tuple[str, object, str | None]]:
        """The name, the kind of error, and the description of each span that has failed."""
        failed = [span for span in self.ended if span.status.status_code is StatusCode.ERROR]
        return [(span.name, (span.attributes or {}).get("error.type"), span.status.description) for span in failed]
