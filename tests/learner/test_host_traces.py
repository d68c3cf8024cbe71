"""What fails on a host has the status of an error in its trace, and nothing else has."""

from collections.abc import Sequence

import pytest
from opentelemetry.context import Context

from resile_learner.agent.events import Command, Event, KillWorker, MessageReceived, WorkerExited
from resile_learner.agent.host_traces import HostTraces
from resile_learner.messages import PeerSuspected
from resile_shared.messages.hosts import Heartbeat, WorkerExit
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


def test_the_first_suspicion_of_a_member_is_an_error(spans: KeptSpans) -> None:
    suspicion = PeerSuspected(worker=0, generation=2, suspect=1, evidence="silence", reason="nothing was received")
    follow(HostTraces("host-1"), MessageReceived("job-1", suspicion))
    assert spans.errors == [("worker suspected", "worker suspected", "nothing was received")]
