"""What fails on a host has the status of an error in its trace, and nothing else has."""

from collections.abc import Sequence

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from resile_learner.agent.events import Command, Event, KillWorker, MessageReceived, WorkerExited
from resile_learner.agent.host_traces import HostTraces
from resile_learner.messages import PeerSuspected
from resile_shared.messages.hosts import Heartbeat, WorkerExit
from resile_shared.telemetry import traces

BEAT = Heartbeat(host="host-1", incarnation=1, number=1, workers=())


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(traces, "_tracer", provider.get_tracer("test"))
    return exporter


def errors(exporter: InMemorySpanExporter) -> list[tuple[str, object, str | None]]:
    failed = [span for span in exporter.get_finished_spans() if not span.status.is_ok and not span.status.is_unset]
    return [(span.name, _attribute(span, "error.type"), span.status.description) for span in failed]


def _attribute(span: ReadableSpan, name: str) -> object:
    return (span.attributes or {}).get(name)


def follow(host: HostTraces, event: Event, commands: Sequence[Command] = (BEAT,)) -> None:
    with host.following(event, commands, Context()):
        pass


def test_the_end_of_a_worker_that_nobody_ordered_is_an_error(exporter: InMemorySpanExporter) -> None:
    follow(HostTraces("host-1"), WorkerExited("job-1", 3, WorkerExit(kind="killed", status=-9)))
    assert errors(exporter) == [("worker is gone", "killed", "worker 3 was killed by SIGKILL (Killed)")]


@pytest.mark.parametrize("kind", ["finished", "left"])
def test_the_end_of_a_worker_that_is_done_is_no_error(exporter: InMemorySpanExporter, kind: str) -> None:
    follow(HostTraces("host-1"), WorkerExited("job-1", 3, WorkerExit.model_validate({"kind": kind})))
    assert [span.name for span in exporter.get_finished_spans()] == ["worker is gone"]
    assert errors(exporter) == []


def test_the_end_of_a_worker_that_was_ordered_is_no_error(exporter: InMemorySpanExporter) -> None:
    host = HostTraces("host-1")
    follow(host, WorkerExited("job-2", 1, WorkerExit(kind="left")), [BEAT, KillWorker("job-1", 3)])
    follow(host, WorkerExited("job-1", 3, WorkerExit(kind="killed", status=-9)))
    assert errors(exporter) == []


def test_the_first_suspicion_of_a_member_is_an_error(exporter: InMemorySpanExporter) -> None:
    suspicion = PeerSuspected(worker=0, generation=2, suspect=1, evidence="silence", reason="nothing was received")
    follow(HostTraces("host-1"), MessageReceived("job-1", suspicion))
    assert errors(exporter) == [("worker suspected", "worker suspected", "nothing was received")]
