"""What an agent knows of each worker here, how heartbeats list it, and which workers were here before. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from resile_shared.messages.hosts import Address, WorkerExit, WorkerReport

MAX_JOBS = 10_000
"""At most this many jobs are remembered: those that were here last."""
MAX_DETAILS_IN_HEARTBEAT = 500_000
"""Maximum characters of tracebacks in a heartbeat; more are left out, since all workers of a host may fail at once."""


@dataclass
class Worker:
    """One worker as the agent sees it."""

    slot: int
    state: Literal["starting", "ready", "member", "left", "gone"] = "starting"
    address: Address | None = None
    generation: int = 0
    iteration: int = 0
    exit: WorkerExit | None = None
    ended: float = 0.0
    in_flight: float | None = None
    """Of a replica: the requests that it had, on average since the last tick."""
    is_killed: bool = False
    warnings: set[str] = field(default_factory=set)
    """The warnings that were passed on."""


def worker_reports(workers: Mapping[tuple[str, int], Worker]) -> Iterator[WorkerReport]:
    """Yield each worker, by job and number, as a heartbeat lists it."""
    room = MAX_DETAILS_IN_HEARTBEAT
    for (job, number), worker in workers.items():
        yield _worker_report(job, number, worker, room)
        room -= len(worker.exit.details) if worker.exit else 0


def _worker_report(job: str, number: int, worker: Worker, room: int) -> WorkerReport:
    exit_ = worker.exit
    if exit_ and len(exit_.details) > room:
        exit_ = exit_.model_copy(update={"details": ""})
    return WorkerReport(
        job=job,
        worker=number,
        slot=worker.slot,
        state=worker.state,
        address=worker.address,
        generation=worker.generation,
        iteration=worker.iteration,
        exit=exit_,
        in_flight=worker.in_flight,
    )


class HighestNumbers:
    """The highest number of each job's workers that were placed here, as a memory of those that have ended.

    The workers of a job are numbered in the order in which allocations name them. So a worker that the agent does not
    know any more, and whose number is not above those that were placed here before, has ended.
    """

    def __init__(self) -> None:
        self._highest: dict[str, int] = {}  # the job that came last is at the end

    def has_placed(self, job: str, worker: int) -> bool:
        """Return whether ``worker``, or one that was named after it, was placed here."""
        return worker <= self._highest.get(job, -1)

    def record(self, job: str, placed: Iterable[int]) -> None:
        """Record that the workers ``placed`` of ``job`` are placed here."""
        highest = max(self._highest.pop(job, -1), *placed, -1)
        if highest >= 0:
            self._highest[job] = highest
        if len(self._highest) > MAX_JOBS:
            del self._highest[next(iter(self._highest))]
