"""One failure, one trace: joins what several notice of the same loss.

Members of each job on a lost host suspect their peers, and the registry misses its heartbeats, each in a trace of its
own. All decisions about the loss continue the trace of the first one. Links connect it with the others, both ways.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from opentelemetry.context import Context, get_current
from opentelemetry.trace import get_current_span

from resile_shared.messages.hosts import HostRecord, HostState
from resile_shared.messages.reports import PeerSuspected, Report
from resile_shared.telemetry.loss_traces import LOSS_DETECTIONS, LossTraces
from resile_shared.telemetry.trace_ids import of_failure
from resile_shared.telemetry.traces import fail, is_recorded, link_to, resumed, trace_id, traced

from .core.events import Command, Event
from .decision_spans import WORKER_LOST, about, failures, is_timed, losses, outcome_of


class LossSpans:
    """Puts what decisions lead to into spans, in the trace of a loss if they are about one."""

    def __init__(self, *, detection_seconds: float) -> None:
        self._hosts = LossTraces(seconds=LOSS_DETECTIONS * detection_seconds)
        self._suspicions = LossTraces(seconds=LOSS_DETECTIONS * detection_seconds)
        """By the job of which a member is suspected."""

    def on_event(self, event: Event, *, now: float) -> None:
        """Note the trace of a suspicion."""
        if isinstance(event, Report) and isinstance(event.content, PeerSuspected):
            self._suspicions.add(event.job, now=now)

    @contextmanager
    def outcome(self, event: Event, commands: Sequence[Command], *, now: float) -> Iterator[None]:
        """Run the block, which carries out ``commands``, in its trace, and mark what fails.

        What follows from a timed event has a span of its own, and begins a trace if it belongs to none.
        """
        lost, here = lost_hosts(event, commands), get_current()
        known = self._hosts.of(lost, now=now)
        is_elsewhere = known is not None and trace_id(known) != trace_id(here)
        is_first = not is_elsewhere and not is_recorded()
        failed = failures(event, commands)
        begun = of_failure() if failed else Context()
        context = known if is_elsewhere else begun if is_first else None
        has_span = is_elsewhere or is_timed(event)
        with (
            resumed(context) if context is not None else nullcontext(),
            traced(outcome_of(commands), about(event, commands)) if has_span else nullcontext(),
        ):
            if is_elsewhere and trace_id(here):
                _connect(here)
            for host in lost:
                self._hosts.add(host, now=now)
            for job, _ in losses(commands):
                suspicion = self._suspicions.of((job,), now=now)
                if suspicion is not None and trace_id(suspicion) not in (trace_id(), trace_id(here)):
                    _connect(suspicion, job=job)
            for kind, reason in failed:
                fail(get_current_span(), kind, reason)
            yield


def lost_hosts(event: Event, commands: Sequence[Command]) -> list[str]:
    """Return the hosts whose loss a decision is about."""
    recorded = [event.host] if isinstance(event, HostRecord) and event.state is HostState.LOST else []
    return list(dict.fromkeys([*recorded, *(loss.host for _, loss in losses(commands) if loss.host)]))


def _connect(other: Context, **about: str) -> None:
    """Link the current span and the trace of ``other``, both ways."""
    here = get_current()
    get_current_span().add_link(link_to(other).context)
    with resumed(other), traced(WORKER_LOST, about, links=(link_to(here),)):
        pass
