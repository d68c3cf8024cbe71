"""A sampler thins the traces that are exported, and drops no failure."""

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from resile_shared.errors import UsageError
from resile_shared.telemetry import traces
from resile_shared.telemetry.exporters import Exports
from resile_shared.telemetry.sampling import MAX_WAITING, SampledSpans, ratio
from resile_shared.telemetry.trace_ids import TraceIds, agreed, of_failure
from resile_shared.telemetry.traces import fail, resumed, set_up_tracing, traced
from resile_testing.collector import collecting


class Sampled:
    """Spans of which a share is exported."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(id_generator=TraceIds())
        provider.add_span_processor(SampledSpans(SimpleSpanProcessor(self.exporter), share))
        monkeypatch.setattr(traces, "_tracer", provider.get_tracer("test"))

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.exporter.get_finished_spans()]


@pytest.fixture
def thin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sampled]:
    """Nothing is exported in which nothing fails."""
    return Sampled(monkeypatch, 0.0)


def test_a_share_of_all_traces_is_exported_each_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = Sampled(monkeypatch, 0.25)
    for number in range(400):
        with traced(f"cause {number}"), traced(f"effect {number}"):
            pass
    kept = {name.split()[1] for name in sampled.names}
    assert 50 < len(kept) < 150
    assert sampled.names == [name for number in sorted(map(int, kept)) for name in whole(number)]


def whole(number: int) -> tuple[str, str]:
    return f"effect {number}", f"cause {number}"


def test_a_trace_that_begins_with_a_failure_is_exported_by_every_service(thin: Sampled) -> None:
    """Also by one that does not know that it failed, such as that of a member that recovers."""
    for context in (of_failure(), agreed(7, "job-1", 2)):
        with resumed(context), traced("worker suspected"), traced("recover"):
            pass
    assert thin.names == ["recover", "worker suspected"] * 2


def test_of_a_trace_in_which_something_fails_later_all_is_exported_that_is_still_there(thin: Sampled) -> None:
    with traced("request"):
        with traced("before"):
            pass
        with traced("failing") as span:
            fail(span, "job failed", "no")
        with traced("after"):
            pass
    with traced("another request"):
        pass
    assert thin.names == ["before", "failing", "after", "request"]


def test_what_waits_for_a_failure_is_bounded(thin: Sampled) -> None:
    with traced("request"):
        for _ in range(2 * MAX_WAITING):
            with traced("step"):
                pass
        with traced("failing") as span:
            fail(span, "job failed", "no")
    assert len(thin.names) == MAX_WAITING + 2


@pytest.mark.parametrize(
    ("sampler", "argument", "share"),
    [
        (None, None, 1.0),
        ("", "", 1.0),
        ("always_on", "0.1", 1.0),
        ("always_off", None, 0.0),
        ("traceidratio", "0.1", 0.1),
        ("traceidratio", None, 1.0),
        ("parentbased_traceidratio", "0", 0.0),
        ("parentbased_always_on", None, 1.0),
    ],
)
def test_the_standard_variables_choose_the_share(
    monkeypatch: pytest.MonkeyPatch, sampler: str | None, argument: str | None, share: float
) -> None:
    for name, value in (("OTEL_TRACES_SAMPLER", sampler), ("OTEL_TRACES_SAMPLER_ARG", argument)):
        if value is not None:
            monkeypatch.setenv(name, value)
    assert ratio() == share


@pytest.mark.parametrize(
    ("sampler", "argument", "message"),
    [
        ("xray", "1", "OTEL_TRACES_SAMPLER=xray: must be always_on, always_off or traceidratio"),
        ("traceidratio", "10%", "OTEL_TRACES_SAMPLER_ARG=10%: must be a number from 0 to 1"),
        ("traceidratio", "1.5", "OTEL_TRACES_SAMPLER_ARG=1.5: must be a number from 0 to 1"),
        ("traceidratio", "nan", "OTEL_TRACES_SAMPLER_ARG=nan: must be a number from 0 to 1"),
    ],
)
def test_a_sampler_that_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch, sampler: str, argument: str, message: str
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    with pytest.raises(UsageError, match=message):
        ratio()


def test_a_service_exports_by_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        exported = Exports("test").spans()
        assert exported is not None
        provider = set_up_tracing("test", processors=(exported,))
        monkeypatch.setattr(traces, "_tracer", provider.get_tracer("test"))
        with traced("success"):
            pass
        with resumed(of_failure()), traced("failure"):
            pass
        provider.shutdown()
    assert [span.name for spans in collector.traces.values() for span in spans] == ["failure"]
