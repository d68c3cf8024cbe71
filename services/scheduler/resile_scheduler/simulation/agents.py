"""The simulated agents of all hosts: which workers run where, and the heartbeats that say so."""

import signal
from collections import defaultdict
from collections.abc import Callable, Iterable

from resile_shared.messages.hosts import Heartbeat, HostRecord, HostState, WorkerExit, WorkerReport

from .job import SimulatedWorker
from .timeline import Timeline

LISTED_SECONDS = 10.0
"""The least number of seconds for which a worker that is gone is listed."""


class SimulatedAgents:
    """The agents of all hosts, by the name of their host."""

    def __init__(self, timeline: Timeline, send: Callable[[Heartbeat], None]) -> None:
        self._timeline = timeline
        self._send = send
        self.hosts: dict[str, HostRecord] = {}
        self.assigned: dict[str, tuple[str, ...]] = {}
        """The jobs whose allocations each host watches."""
        self._running: defaultdict[str, dict[int, SimulatedWorker]] = defaultdict(dict)
        """The live workers, by host and slot."""
        self._gone: defaultdict[str, dict[tuple[str, int], tuple[SimulatedWorker, WorkerReport, float]]]
        self._gone = defaultdict(dict)
        self._silent: set[str] = set()
        self._due: set[str] = set()
        self._num_beats = 0

    def add(self, record: HostRecord) -> None:
        """Add a host, which may have been there before."""
        self.hosts[record.host] = record
        self.assigned.pop(record.host, None)
        self._silent.discard(record.host)

    def remove(self, host: str) -> None:
        """Forget a host that has left."""
        for known in (self.hosts, self.assigned, self._running, self._gone):
            known.pop(host, None)
        self._silent.discard(host)

    def silence(self, host: str) -> None:
        """Let a host send nothing any more."""
        self._silent.add(host)

    def is_silent(self, host: str) -> bool:
        """Whether a host sends nothing any more."""
        return host in self._silent

    def running(self, host: str) -> list[SimulatedWorker]:
        """Return the workers of a host whose processes are alive."""
        return list(self._running[host].values())

    def start(self, worker: SimulatedWorker) -> None:
        """Start a worker on its slot, which must be free."""
        running = self._running[worker.host]
        assert worker.slot not in running, f"{worker.host}/{worker.slot} is held by two workers"
        running[worker.slot] = worker

    def end(self, worker: SimulatedWorker, kind: str) -> None:
        """End a worker; its agent reports it as gone."""
        del self._running[worker.host][worker.slot]
        exit_ = WorkerExit.model_validate({"kind": kind, "status": -signal.SIGKILL if kind == "killed" else 0})
        gone = WorkerReport(job=worker.job.id, worker=worker.number, slot=worker.slot, state="gone", exit=exit_)
        self._gone[worker.host][worker.job.id, worker.number] = worker, gone, self._timeline.now
        self.beat_soon(worker.host)

    def end_all(self, host: str) -> list[SimulatedWorker]:
        """End all workers of a host that is gone itself; return them."""
        return list(self._running.pop(host, {}).values())

    def beat_soon(self, host: str) -> None:
        """Let a host send a heartbeat once all that happens at this moment has happened."""
        if host not in self._due:
            self._due.add(host)
            self._timeline.later(0.0, lambda: self._beat_due(host))

    def _beat_due(self, host: str) -> None:
        if host in self._due:
            self.beat(host)

    def report_unknown(self, host: str, workers: Iterable[SimulatedWorker]) -> None:
        """Let a host list workers that it never had as gone, and send one heartbeat if it did not list all of them."""
        listed = self._gone[host]
        new = [worker for worker in workers if (worker.job.id, worker.number) not in listed]
        for worker in new:
            exit_ = WorkerExit(kind="not started")
            gone = WorkerReport(job=worker.job.id, worker=worker.number, slot=worker.slot, state="gone", exit=exit_)
            listed[worker.job.id, worker.number] = worker, gone, self._timeline.now
        if new:
            self.beat(host)

    def beat(self, host: str) -> None:
        """Let a host send a heartbeat now."""
        self._due.discard(host)
        if host in self._silent or host not in self.hosts:
            return
        self._num_beats += 1
        now = self._timeline.now
        workers = [
            WorkerReport(
                job=worker.job.id,
                worker=worker.number,
                slot=worker.slot,
                state=worker.state,
                address=worker.address,
                generation=worker.generation,
                iteration=worker.job.iteration_at(now),
            )
            for worker in self._running[host].values()
        ]
        beat = Heartbeat(
            host=host,
            incarnation=self.hosts[host].incarnation,
            number=self._num_beats,
            jobs=self.assigned.get(host),
            workers=(*workers, *self._listed_as_gone(host)),
        )
        self._send(beat)

    def _listed_as_gone(self, host: str) -> list[WorkerReport]:
        """Return those that ended not long ago, or that the newest allocation still names."""
        recent = self._timeline.now - LISTED_SECONDS
        kept = {
            key: entry
            for key, entry in self._gone[host].items()
            if not entry[0].job.is_removed and (entry[2] > recent or entry[0].is_named)
        }
        self._gone[host] = kept
        return [report for _, report, _ in kept.values()]

    def beat_all(self) -> None:
        """Let every host that is there send a heartbeat now."""
        for name, record in self.hosts.items():
            if record.state in (HostState.UP, HostState.DRAINING):
                self.beat(name)
