"""What an agent measures of its host, from the events that its core handles and the commands that it returns."""

from collections import Counter
from collections.abc import Sequence

from opentelemetry.metrics import Meter

from resile_shared.messages.hosts import Heartbeat
from resile_shared.messages.reports import Progress, Report, Switched
from resile_shared.telemetry.metrics import gauge, histogram, total

from .events import Command, Event, StartWorker, Tick, WorkerExited

_STATES = ("starting", "ready", "member", "left")
MAX_JOBS = 1000
"""The newest iteration is remembered for at most this many jobs."""


class AgentMetrics:
    """The metrics of one host, over all incarnations of its agent."""

    def __init__(self, meter: Meter) -> None:
        self._workers: Counter[str] = Counter()
        self._num_waiting = 0
        self._num_heartbeats = 0
        self._iterations: dict[str, int] = {}
        """The newest iteration of each job that was reported here."""
        self._counted = meter.create_counter(
            "resile_iterations", description="Iterations committed by jobs whose first worker is on this host."
        )
        self._seconds = histogram(meter, "resile_iteration", "Time of an iteration, as jobs report it now and then.")
        self._started = meter.create_counter("resile_workers_started", description="Workers started.")
        self._exits = meter.create_counter("resile_worker_exits", description="Workers that ended, by how they did.")
        gauge(meter, "resile_host_workers", self._by_state, "Workers of this host by state.", label="state")
        gauge(meter, "resile_agent_reports_waiting", lambda: self._num_waiting, "Facts of workers not published yet.")
        self._in_flight = 0.0
        self._replies = meter.create_counter("resile_requests", description="Requests to replicas, by their status.")
        gauge(meter, "resile_requests_in_flight", lambda: self._in_flight, "Requests that replicas of this host have.")
        total(meter, "resile_heartbeats_sent", lambda: self._num_heartbeats, "Heartbeats of this host.")

    def on_handled(self, event: Event, commands: Sequence[Command], *, num_waiting: int) -> None:
        """Count what has resulted from ``event``, which the core has handled."""
        self._num_waiting = num_waiting
        if isinstance(event, WorkerExited):
            self._exits.add(1, {"kind": event.exit.kind})
        elif isinstance(event, Tick):
            self._in_flight = sum(event.in_flight.values())
        for command in commands:
            match command:
                case Heartbeat(workers=workers):
                    self._workers = Counter(worker.state for worker in workers)
                    self._num_heartbeats += 1
                case StartWorker():
                    self._started.add(1)
                case Report(job=job, content=Progress() as progress):
                    self._on_progress(job, progress)
                case Report(job=job, content=Switched(iteration=iteration)):
                    self._come_to(job, iteration)

    def on_reply(self, status: str) -> None:
        """Count a request to a replica that was answered."""
        self._replies.add(1, {"status": status})

    def _on_progress(self, job: str, progress: Progress) -> None:
        """Count the iterations since the last report, or since a generation began."""
        if progress.iteration_seconds:
            self._seconds.record(progress.iteration_seconds)
        known = self._come_to(job, progress.iteration)
        if known is not None and progress.iteration > known:
            self._counted.add(progress.iteration - known)

    def _come_to(self, job: str, iteration: int) -> int | None:
        """Remember the iteration that a job has reached; return the one remembered before."""
        known = self._iterations.pop(job, None)
        self._iterations[job] = iteration
        if len(self._iterations) > MAX_JOBS:
            del self._iterations[next(iter(self._iterations))]
        return known

    def _by_state(self) -> dict[str, float]:
        return {state: self._workers[state] for state in _STATES}
