"""What fails on a host has the status of an error in its trace, and nothing else has."""

from collections.abc import Sequence

import pytest
from opentelemetry.context import Context

from resile_learner.agent.events import AllocationGone, Command, Event, KillWorker, MessageReceived, WorkerExited
from resile_learner.agent.host_traces import HostTraces
from resile_learner.messages import Failed, PeerSuspected, Switched
from resile_shared.messages.allocations import Allocation
from resile_shared.messages.hosts import Heartbeat, WorkerExit
from resile_shared.telemetry.traces import begin, in_span
from resile_testing.spans import KeptSpans

BEAT = Heartbeat(host="host-1", incarnation=1, number=1, workers=())


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> KeptSpans:
    return KeptSpans(monkeypatch)


def follow(host: HostTraces, event: Event, commands: Sequence[Command] = (BEAT,)) -> None:
    with host.following(event, commands, Context()):
        pass


def test_the_end_of_a_worker_that_nobody_ordered_is_an_error(spans: KeptSpans) -> None:
    follow(HostTraces("host-1"), WorkerExited("job-1", 3, WorkerExit(kind="killed", status=-9)))
    assert spans.errors == [("worker is gone", "killed", "worker 3 was killed by SIGKILL (Killed)")]


@pytest.mark.parametrize("kind", ["finished", "left"])
def test_the_end_of_a_worker_that_is_done_is_no_error(spans: KeptSpans, kind: str) -> None:
    follow(HostTraces("host-1"), WorkerExited("job-1", 3, WorkerExit.model_validate({"kind": kind})))
    assert spans.names == ["worker is gone"]
    assert spans.errors == []


def test_the_end_of_a_worker_that_was_ordered_is_no_error(spans: KeptSpans) -> None:
    host = HostTraces("host-1")
    follow(host, WorkerExited("job-2", 1, WorkerExit(kind="left")), [BEAT, KillWorker("job-1", 3)])
    follow(host, WorkerExited("job-1", 3, WorkerExit(kind="killed", status=-9)))
    assert spans.errors == []


def test_a_worker_that_fails_is_an_error_and_so_is_its_end_in_the_same_trace(spans: KeptSpans) -> None:
    host = HostTraces("host-1")
    follow(host, MessageReceived("job-1", Failed(worker=3, message="ValueError: no")))
    follow(host, WorkerExited("job-1", 3, WorkerExit(kind="failed", message="ValueError: no")))
    kinds = [("worker failed", "failed"), ("worker is gone", "failed")]
    assert [(name, kind) for name, kind, _ in spans.errors] == kinds
    assert len(traces_of(spans)) == 1


def test_a_suspicion_alone_is_no_error_since_it_may_be_wrong(spans: KeptSpans) -> None:
    follow(HostTraces("host-1"), suspicion(generation=2))
    assert spans.names == ["worker suspected"]
    assert spans.errors == []


def test_all_hosts_notice_a_failure_in_one_trace_which_the_next_generation_does_not_share(spans: KeptSpans) -> None:
    """One sees the end of the process, the other that its peer is silent, though the next allocation is known there."""
    one, other = HostTraces("host-1"), HostTraces("host-2")
    allocate(2, one, other)
    for host in (one, other):
        follow(host, MessageReceived("job-1", Switched(worker=0, generation=2, iteration=5, workers=(0, 1))))
    allocate(3, one, other)
    follow(one, WorkerExited("job-1", 0, WorkerExit(kind="killed", status=-9)))
    for worker in (1, 2):
        follow(other, suspicion(generation=2, worker=worker))
    assert spans.names[-2:] == ["worker is gone", "worker suspected"], "a suspicion that is repeated has no span"
    first = traces_of(spans, "worker is gone", "worker suspected")
    assert len(first) == 1
    for host in (one, other):
        follow(host, MessageReceived("job-1", Switched(worker=1, generation=3, iteration=6, workers=(1, 5))))
    follow(other, WorkerExited("job-1", 5, WorkerExit(kind="killed", status=-9)))
    assert spans.ended[-1].context.trace_id not in first


def test_workers_that_fail_when_their_job_is_over_fail_in_the_trace_of_its_failure(spans: KeptSpans) -> None:
    one, other = HostTraces("host-1"), HostTraces("host-2")
    allocate(1, one, other)
    follow(one, MessageReceived("job-1", Failed(worker=0, message="ValueError: no")))
    for host in (one, other):
        follow(host, AllocationGone("job-1"))
        follow(host, MessageReceived("job-1", Failed(worker=1, message="ValueError: no")))
    assert spans.names.count("worker failed") == 3
    assert len(traces_of(spans, "worker failed")) == 1


def test_failures_of_jobs_with_one_id_in_two_pools_are_two_traces(spans: KeptSpans) -> None:
    for _ in range(2):
        host = HostTraces("host-1")
        allocate(1, host)
        follow(host, suspicion(generation=1))
    assert len(traces_of(spans, "worker suspected")) == 2


def allocate(generation: int, *hosts: HostTraces) -> None:
    """Have an allocation arrive at hosts, in the trace in which the scheduler wrote it."""
    allocation = Allocation(job="job-1", epoch=1, generation=generation, placements=(), secret="x" * 64)
    written = in_span(begin("resize jobs"))
    for host in hosts:
        with host.following(allocation, (BEAT,), written):
            pass


def suspicion(*, generation: int, worker: int = 1) -> MessageReceived:
    found = PeerSuspected(
        worker=worker, generation=generation, suspect=0, evidence="silence", reason="nothing was received"
    )
    return MessageReceived("job-1", found)


def traces_of(spans: KeptSpans, *names: str) -> set[int]:
    return {span.context.trace_id for span in spans.ended if not names or span.name in names}
