"""What an agent does for its host: the decisions, without input or output.

Events go in through `AgentCore.handle`, commands come out; the shell carries them out. The rules:

- The newest allocation of a job is the truth; an older one has no effect. A worker that it places on this host and
  incarnation, and that never was here, is started. With all addresses it is an order, and every worker of the job here
  hears it: members, joiners and leavers alike. Without placements, all workers of the job here end.
- A heartbeat lists every worker, once a tick and at each change. One that is gone stays listed while the
  newest allocation names it, and for a while in any case. While NATS is disconnected none is sent.
- What workers report is told on. Of progress the newest word counts and is told a few times a second; all else is a
  fact, told in order and after the progress that preceded it.
- Until the host's record shows this incarnation, its hello is repeated, ever more rarely, as each one is stored. One
  that is lost or has left is over.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

from resile_shared.messages.allocations import Allocation, Placement
from resile_shared.messages.hosts import Address, Heartbeat, HostRecord, HostState, WorkerExit, WorkerReport
from resile_shared.messages.instructions import PauseWorkers, SendHeartbeat, StopWorkers
from resile_shared.messages.message import at
from resile_shared.messages.reports import Report

from ..messages import (
    Finished,
    FromWorker,
    Hello,
    Joined,
    Left,
    Member,
    Message,
    Order,
    Pause,
    Progress,
    Ready,
    ReportedByWorker,
    SignedByMember,
    Switched,
    content_of,
)
from .events import AllocationGone, Command, End, Event, Exited, Garbled, Kill, Said, SayHello, Send, Start, Tick

HELLO_SECONDS = 5.0
MAX_HELLO_SECONDS = 300.0
PROGRESS_SECONDS = 0.25
LISTED_SECONDS = 10.0
MAX_MESSAGE = 2000
MAX_DETAILS = 20_000
_GONE = (HostState.LOST, HostState.LEFT)

T = TypeVar("T", bound=Message)


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
    is_unneeded: bool = False
    fault: str = ""
    """What of its words could not be understood."""


class AgentCore:
    """The state of one incarnation and all its decisions. What it knows can be read; only `handle` changes it."""

    def __init__(self, host: str, incarnation: int) -> None:
        self.host = host
        self.incarnation = incarnation
        self.is_known = False
        """Whether the registry has stored this incarnation."""
        self.workers: dict[tuple[str, int], Worker] = {}
        self._allocations: dict[str, Allocation] = {}
        self._is_bus_up = False
        self._num_beats = 0
        self._hello_due = 0.0
        self._hello_pause = HELLO_SECONDS
        self._progress: dict[str, Report] = {}  # not told yet
        self._progress_at: dict[str, float] = {}

    def needs(self, job: str) -> bool:
        """Tell whether a worker of ``job`` is here, or shall be."""
        allocation = self._allocations.get(job)
        return any(True for _ in self._living(job)) or any(True for _ in self._placed_here(allocation))

    def handle(self, event: Event, *, now: float) -> list[Command]:
        """Take ``event`` in at ``now`` (seconds since the epoch); return what is to be done about it, in order."""
        match event:
            case Allocation():
                return self._allocated(event, now)
            case AllocationGone(job):
                self._allocations.pop(job, None)
                return self._end_workers(job, (number for number, _ in self._living(job)))
            case HostRecord():
                return self._recorded(event)
            case StopWorkers() | PauseWorkers() | SendHeartbeat():
                return self._instructed(event, now)
            case Said(job, message):
                return self._said(job, message, now)
            case Garbled(job, worker, problem):
                self.workers[job, worker].fault = problem
                return self._end_workers(job, [worker])
            case Exited(job, worker, exit_):
                return self._exited(job, worker, exit_, now)
            case Tick(is_bus_up):
                return self._tick(is_bus_up, now)

    # what the scheduler and the registry say

    def _allocated(self, allocation: Allocation, now: float) -> list[Command]:
        job = allocation.job
        known = self._allocations.get(job)
        if known and (allocation.epoch, allocation.generation) < (known.epoch, known.generation):
            return []
        self._allocations[job] = allocation
        if not allocation.placements:
            return self._end_workers(job, (number for number, _ in self._living(job)))
        starts: list[Command] = []
        for placement in self._placed_here(allocation):
            if (job, placement.worker) not in self.workers:
                self.workers[job, placement.worker] = Worker(placement.slot)
                starts.append(Start(job, placement.worker, placement.slot, resume=allocation.resume))
        order = _order(allocation)
        return [
            *starts,
            *(self._beat(now) if starts else []),
            *(self._send(job, order) if order else []),
        ]

    def _recorded(self, record: HostRecord) -> list[Command]:
        if record.host != self.host or record.incarnation < self.incarnation:
            return []
        if record.incarnation > self.incarnation:
            reason = f"another agent runs as host {self.host}: give this one another name (--host)"
            return [End(reason, is_superseded=True)]
        self.is_known = True
        if record.state in _GONE:
            return [End(f"the registry holds incarnation {self.incarnation} to be {record.state}: {record.reason}")]
        return []

    def _instructed(self, instruction: StopWorkers | PauseWorkers | SendHeartbeat, now: float) -> list[Command]:
        match instruction:
            case StopWorkers():
                return self._stop(instruction, now)
            case PauseWorkers(job=job, generation=generation):
                return self._send(job, Pause(generation=generation))
            case SendHeartbeat(incarnation=incarnation):
                return self._beat(now) if incarnation == self.incarnation else []

    def _stop(self, stop: StopWorkers, now: float) -> list[Command]:
        """End workers. A stop is repeated until a heartbeat shows them gone, so it leads to one only by a change."""
        if stop.incarnation != self.incarnation:
            return []
        unknown = [number for number in stop.workers if (stop.job, number) not in self.workers]
        for number in unknown:
            exit_ = WorkerExit(kind="not started", message="it was stopped before it started")
            self.workers[stop.job, number] = Worker(0, "gone", exit=exit_, ended=now)
        return [*self._end_workers(stop.job, stop.workers), *(self._beat(now) if unknown else [])]

    # what workers say

    def _said(self, job: str, message: FromWorker, now: float) -> list[Command]:
        worker = self.workers[job, message.worker]
        if worker.state == "gone":
            return []
        before = (worker.state, worker.address, worker.generation)
        self._take_in(job, message, worker)
        changed = before != (worker.state, worker.address, worker.generation) or isinstance(message, Switched)
        beat = self._beat(now) if changed else []
        match message:
            case Hello():
                order = _order(self._allocations.get(job))
                return [*beat, *([Send(job, message.worker, order)] if order else [])]
            case Joined() | Finished():
                return beat
            case _:
                return [*beat, *self._report(job, message, worker, now)]

    def _take_in(self, job: str, message: FromWorker, worker: Worker) -> None:
        match message:
            case Hello(host=host, port=port):
                worker.address = worker.address or Address(host=host, port=port)
            case Ready() if worker.state == "starting":
                worker.state = "ready"
            case Joined(generation=generation, iteration=iteration):
                self._joined(job, message.worker, generation, iteration)
            case Switched(workers=members, generation=generation, iteration=iteration):
                for number in members:
                    self._joined(job, number, generation, iteration)
            case Progress(iteration=iteration):
                worker.iteration = iteration
            case Left(iteration=iteration):
                worker.state, worker.iteration = "left", iteration
            case _:
                pass

    def _joined(self, job: str, number: int, generation: int, iteration: int) -> None:
        worker = self.workers.get((job, number))
        if worker and worker.state in ("starting", "ready", "member"):
            worker.state, worker.generation, worker.iteration = "member", generation, iteration

    def _report(self, job: str, message: ReportedByWorker, worker: Worker, now: float) -> list[Command]:
        report = Report(
            job=job,
            host=self.host,
            incarnation=self.incarnation,
            worker=message.worker,
            slot=worker.slot,
            generation=message.generation if isinstance(message, SignedByMember) else worker.generation,
            time=at(now),
            content=_bounded(content_of(message)),
        )
        if not isinstance(message, Progress):
            return [*self._held_progress(job), report]
        self._progress[job] = report
        is_due = now - self._progress_at.get(job, 0.0) >= PROGRESS_SECONDS
        if not (is_due or message.ends_epoch):
            return []
        self._progress_at[job] = now
        return self._held_progress(job)

    def _held_progress(self, job: str) -> list[Command]:
        held = self._progress.pop(job, None)
        return [held] if held else []

    def _exited(self, job: str, number: int, exit_: WorkerExit, now: float) -> list[Command]:
        worker = self.workers[job, number]
        if worker.fault:
            exit_ = WorkerExit(kind="failed", status=exit_.status, message=worker.fault)
        worker.state, worker.exit, worker.ended = "gone", _bounded(exit_), now
        return [*self._held_progress(job), *self._beat(now)]

    # time

    def _tick(self, is_bus_up: bool, now: float) -> list[Command]:
        self._is_bus_up = is_bus_up
        self._forget(now)
        commands = [command for job in list(self._progress) for command in self._held_progress(job)]
        if not is_bus_up:
            return commands
        if not self.is_known and now >= self._hello_due:
            self._hello_due, self._hello_pause = now + self._hello_pause, min(2 * self._hello_pause, MAX_HELLO_SECONDS)
            commands.append(SayHello())
        return [*commands, *self._beat(now)]

    def _beat(self, now: float) -> list[Command]:
        if not self._is_bus_up:
            return []
        self._num_beats += 1
        beat = Heartbeat(
            host=self.host,
            incarnation=self.incarnation,
            number=self._num_beats,
            workers=tuple(_described(job, number, worker) for (job, number), worker in self.workers.items()),
        )
        return [beat]

    def _forget(self, now: float) -> None:
        """Drop the workers that are gone, were listed long enough, and are not named any more."""
        for (job, number), worker in list(self.workers.items()):
            if worker.state != "gone" or now - worker.ended < LISTED_SECONDS:
                continue
            if all(placement.worker != number for placement in self._placed_here(self._allocations.get(job))):
                del self.workers[job, number]

    # workers

    def _placed_here(self, allocation: Allocation | None) -> Iterator[Placement]:
        for placement in allocation.placements if allocation else ():
            if (placement.host, placement.incarnation) == (self.host, self.incarnation):
                yield placement

    def _living(self, job: str) -> Iterator[tuple[int, Worker]]:
        for (other, number), worker in self.workers.items():
            if other == job and worker.state != "gone":
                yield number, worker

    def _send(self, job: str, message: Order | Pause) -> list[Command]:
        """Tell the workers of ``job`` that listen; one that does not yet hears the newest order when it does."""
        return [Send(job, number, message) for number, worker in self._living(job) if worker.address]

    def _end_workers(self, job: str, numbers: Iterable[int]) -> list[Command]:
        ending = [(number, self.workers[job, number]) for number in numbers]
        commands: list[Command] = []
        for number, worker in ending:
            if worker.state != "gone" and not worker.is_unneeded:
                worker.is_unneeded = True
                commands.append(Kill(job, number))
        return commands


def _bounded(said: T) -> T:
    """Cut what a worker said of its end, which may be anything, to what a message has room for."""
    limits = {"message": slice(MAX_MESSAGE), "details": slice(-MAX_DETAILS, None)}
    texts = {name: getattr(said, name)[limit] for name, limit in limits.items() if hasattr(said, name)}
    return said.model_copy(update=texts)


def _order(allocation: Allocation | None) -> Order | None:
    """Return what the workers are told of an allocation; None until all can be reached."""
    if allocation is None or not allocation.placements or not allocation.has_addresses:
        return None
    return Order(
        job=allocation.job,
        generation=allocation.generation,
        members=tuple(
            Member(worker=placement.worker, host=placement.address.host, port=placement.address.port)
            for placement in allocation.placements
            if placement.address
        ),
        secret=allocation.secret,
        cold_start=allocation.cold_start,
        is_recovery=allocation.is_recovery,
        not_before=allocation.not_before,
        until=allocation.until,
    )


def _described(job: str, number: int, worker: Worker) -> WorkerReport:
    return WorkerReport(
        job=job,
        worker=number,
        slot=worker.slot,
        state=worker.state,
        address=worker.address,
        generation=worker.generation,
        iteration=worker.iteration,
        exit=worker.exit,
    )
