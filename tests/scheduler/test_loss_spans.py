"""A loss is one trace with one error, however many notice it: what they noticed apart is linked both ways."""

from collections.abc import Sequence

import pytest
from opentelemetry.context import get_current
from opentelemetry.trace import StatusCode

from resile_scheduler.core.events import Command, Event, ProbeExpired, StateRestored, WriteAllocation
from resile_scheduler.loss_spans import LossSpans
from resile_shared.messages.allocations import Allocation, Loss
from resile_shared.messages.hosts import HostRecord, HostState
from resile_shared.messages.message import at
from resile_shared.messages.reports import PeerSuspected, Report
from resile_shared.telemetry.traces import resumed, traced
from resile_testing.spans import KeptSpans

NOW = at(0.0)
EXPIRED = ProbeExpired("host-2", incarnation=1, beat=7)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> KeptSpans:
    return KeptSpans(monkeypatch)


def decide(losses: LossSpans, event: Event, commands: Sequence[Command] = (), *, now: float = 0.0) -> None:
    losses.on_event(event, now=now)
    with losses.outcome(event, commands, now=now):
        pass


def suspicion(job: str) -> Report:
    content = PeerSuspected(suspect=2, evidence="broken link", reason="the connection broke")
    return Report(job=job, host="host-1", incarnation=1, worker=1, slot=0, generation=1, time=NOW, content=content)


def recovery(*jobs: str, host: str | None = "host-2") -> list[Command]:
    loss = Loss(reason="host-2 does not answer" if host else "worker 2 was killed", host=host)
    return [
        WriteAllocation(Allocation(job=job, epoch=1, generation=2, placements=(), secret="s" * 64, loss=loss))
        for job in jobs
    ]


def host(state: HostState) -> HostRecord:
    return HostRecord(host="host-2", incarnation=1, state=state, slots=(), device_class="cpu", address="::1", since=NOW)


def linked(spans: KeptSpans) -> set[tuple[int, int]]:
    return {(span.context.trace_id, link.context.trace_id) for span in spans.ended for link in span.links}


def trace_of(spans: KeptSpans, name: str) -> int:
    (found,) = {span.context.trace_id for span in spans.ended if span.name == name}
    return found


def errors(spans: KeptSpans) -> list[tuple[int, object]]:
    failed = [span for span in spans.ended if span.status.status_code is StatusCode.ERROR]
    return [(span.context.trace_id, (span.attributes or {})["error.type"]) for span in failed]


def test_two_jobs_lose_a_host_and_the_registry_misses_it_in_one_trace(spans: KeptSpans) -> None:
    losses = LossSpans(detection_seconds=3.0)
    for number in (1, 2):
        with traced(f"suspicion {number}"):
            decide(losses, suspicion(f"job-{number}"))
            if number == 1:
                probe = get_current()
    with resumed(probe):
        decide(losses, EXPIRED, recovery("job-1", "job-2"), now=0.1)
    with traced("registry"):
        decide(losses, host(HostState.LOST), recovery("job-3"), now=3.0)
    first, second, registry = [trace_of(spans, name) for name in ("suspicion 1", "suspicion 2", "registry")]
    assert errors(spans) == [(first, "host lost")] * 2
    assert linked(spans) == {(first, second), (second, first), (first, registry), (registry, first)}


def test_the_registry_notices_a_loss_first_and_what_others_say_later_is_linked(spans: KeptSpans) -> None:
    losses = LossSpans(detection_seconds=3.0)
    with traced("registry"):
        decide(losses, host(HostState.LOST), recovery("job-1"))
    with traced("suspicion"):
        decide(losses, suspicion("job-2"), now=1.0)
        decide(losses, EXPIRED, recovery("job-2"), now=1.0)
    registry, suspected = trace_of(spans, "registry"), trace_of(spans, "suspicion")
    assert errors(spans) == [(registry, "host lost")] * 2
    assert linked(spans) == {(registry, suspected), (suspected, registry)}


def test_a_host_that_is_lost_again_much_later_has_another_trace(spans: KeptSpans) -> None:
    losses = LossSpans(detection_seconds=3.0)
    for now in (0.0, 9.1):
        with traced("registry"):
            decide(losses, host(HostState.LOST), recovery("job-1"), now=now)
    assert len({trace for trace, _ in errors(spans)}) == 2
    assert linked(spans) == set()


def test_a_loss_of_a_worker_is_not_joined_with_that_of_its_host(spans: KeptSpans) -> None:
    losses = LossSpans(detection_seconds=3.0)
    for job in ("job-1", "job-2"):
        with traced("suspicion"):
            decide(losses, suspicion(job), recovery(job, host=None))
    assert [kind for _, kind in errors(spans)] == ["worker lost"] * 2
    assert len({trace for trace, _ in errors(spans)}) == 2
    assert linked(spans) == set()


def test_a_new_scheduler_that_writes_an_allocation_again_has_lost_nothing(spans: KeptSpans) -> None:
    decide(LossSpans(detection_seconds=3.0), StateRestored((), (), ()), recovery("job-1"))
    assert errors(spans) == []
