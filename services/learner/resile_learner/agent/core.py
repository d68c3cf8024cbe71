"""The decisions of an agent for its host; pure.

`AgentCore.handle` takes events and returns commands, which the shell carries out. The rules:

- The allocations of the jobs that the scheduler has assigned to this host are watched, and those of jobs with a worker
  here, whatever it has assigned. Allocations of other jobs have no effect, and nothing is kept of them.
- The newest allocation of a job is the truth; an older one has no effect. Nor has anything from a scheduler of an
  earlier epoch than the latest seen, whichever job it is about.
- A worker that an allocation places on this host and incarnation is started unless it has ever been here, or its slot
  is held: no two workers are ever on one slot. One that has ended and is forgotten (`HighestNumbers`) is reported as
  gone: a scheduler that does not know of its end may name it again. With all addresses known, the allocation is
  sent as an order to every worker of the job here: members, joiners and leavers alike. Without placements, all workers
  of the job here are killed.
- A heartbeat lists every worker. One is sent at each tick and at each change, and none while NATS is disconnected. A
  worker that is gone stays listed while the newest allocation names it, and for `LISTED_SECONDS` in any case.
- What workers report is passed on: the rules are in `report_filter.py`.
- A worker is forked once it is prepared, from a template if there is one for it: the rules are in `templates.py`.
- The environments that the scheduler asks for are built before workers need them; heartbeats report the state of each.
- Once the templates of the previous incarnation are ready, the host is announced, with growing pauses, until its stored
  record shows this incarnation. An incarnation that the registry declares lost or left ends.
"""

from collections.abc import Iterable, Iterator

from resile_shared.messages.allocations import Allocation, Placement
from resile_shared.messages.hosts import (
    Address,
    EnvironmentReport,
    Heartbeat,
    HostRecord,
    HostState,
    WorkerExit,
)
from resile_shared.messages.instructions import AssignJobs, PauseWorkers, SendHeartbeat, StopWorkers
from resile_shared.recent_events import RecentEvents

from ..messages import (
    ChangeTraced,
    Finished,
    FromWorker,
    GangPlace,
    Imported,
    Joined,
    Left,
    Member,
    Order,
    Pause,
    Progress,
    Ready,
    Switched,
    Trained,
    Warned,
    WorkerListening,
)
from .events import (
    AllocationGone,
    AnnounceHost,
    Command,
    EndIncarnation,
    Event,
    KillWorker,
    MessageReceived,
    PrepareEnvironments,
    SendToWorker,
    StartWorker,
    TemplateEnded,
    TemplateKept,
    TemplateReady,
    Tick,
    UnwatchAllocation,
    WatchAllocation,
    WorkerExited,
    WorkerPrepared,
)
from .report_filter import ReportFilter
from .templates import Templates
from .worker_records import HighestNumbers, Worker, worker_reports

ANNOUNCE_SECONDS = 5.0
MAX_ANNOUNCE_SECONDS = 300.0
LISTED_SECONDS = 10.0
_GONE = (HostState.LOST, HostState.LEFT)


class AgentCore:
    """The state of one incarnation and all its decisions. The state can be read; only `handle` changes it."""

    def __init__(self, host: str, incarnation: int, *, builds_ahead: bool = False) -> None:
        """Make the core; ``builds_ahead``: its shell builds environments before workers need them."""
        self.host = host
        self.incarnation = incarnation
        self.is_registered = False
        """Whether the registry has stored this incarnation."""
        self.workers: dict[tuple[str, int], Worker] = {}
        self._assigned: frozenset[str] | None = None
        """The jobs that the scheduler has assigned to this host; None before any assignment has arrived."""
        self._environments: dict[str, EnvironmentReport] | None = {} if builds_ahead else None
        """State of each environment that the scheduler asks for, in its order; None: this host builds none ahead."""
        self._watched: frozenset[str] = frozenset()
        self._allocations: dict[str, Allocation] = {}
        self._highest = HighestNumbers()
        self._templates = Templates()
        self._epoch = 0
        """The latest epoch of a scheduler that was seen."""
        self._is_bus_up = False
        self._num_beats = 0
        self._num_waiting = 0
        self._announce_due = 0.0
        self._announce_pause = ANNOUNCE_SECONDS
        self._reports = ReportFilter(host, incarnation)
        self._recent = RecentEvents(f"agent of {host}")

    def needs(self, job: str) -> bool:
        """Return whether a worker of ``job`` is here, or may be placed here, as far as is known."""
        return self._assigned is None or job in self._watched

    def handle(self, event: Event, *, now: float) -> list[Command]:
        """Handle ``event`` at ``now`` (seconds since the epoch); return the commands to carry out, in order.

        Raises InternalError, with the last events, when a rule of the core is broken.
        """
        with self._recent.handling(event):
            return [] if self._is_from_earlier_leader(event) else self._handle(event, now)

    def _is_from_earlier_leader(self, event: Event) -> bool:
        if not isinstance(event, Allocation | AssignJobs | StopWorkers | PauseWorkers):
            return False
        is_earlier = event.epoch < self._epoch
        self._epoch = max(self._epoch, event.epoch)
        return is_earlier

    def _handle(self, event: Event, now: float) -> list[Command]:
        match event:
            case Allocation():
                return self._on_allocation(event, now)
            case AllocationGone() | HostRecord():
                return self._on_record(event)
            case AssignJobs() | StopWorkers() | PauseWorkers() | SendHeartbeat():
                return self._on_instruction(event, now)
            case MessageReceived(job, message):
                return self._on_message(job, message, now)
            case WorkerPrepared() | TemplateKept() | TemplateReady() | TemplateEnded():
                return [*self._templates.handle(event, now), *self._announce(now)]
            case WorkerExited(job, worker, exit_):
                return self._on_exit(job, worker, exit_, now)
            case EnvironmentReport():
                return self._on_environment(event, now)
            case Tick():
                return self._on_tick(event, now)

    def _on_allocation(self, allocation: Allocation, now: float) -> list[Command]:
        job = allocation.job
        if job not in self._watched:
            return []
        known = self._allocations.get(job)
        if known and (allocation.epoch, allocation.generation) < (known.epoch, known.generation):
            return []
        self._allocations[job] = allocation
        if not allocation.placements:
            return self._kill_all(job)
        placed = list(self._placed_here(allocation))
        new = [placement for placement in placed if (job, placement.worker) not in self.workers]
        starts = [command for placement in new for command in self._start(allocation, placement, now)]
        self._highest.record(job, (placement.worker for placement in placed))
        order = _order(allocation)
        return [
            *starts,
            *(self._heartbeat(now) if new else []),
            *(self._send(job, order) if order else []),
        ]

    def _start(self, allocation: Allocation, placement: Placement, now: float) -> list[Command]:
        """Start a worker, unless it has ended, or another one is on its slot: it is then reported as gone."""
        job = allocation.job
        if self._highest.has_placed(job, placement.worker):
            self._list_as_gone(job, placement, "it ended, and how was not reported in time", now)
            return []
        held = (key for key, worker in self.workers.items() if worker.slot == placement.slot and worker.state != "gone")
        if holder := next(held, None):
            message = (
                f"worker {placement.worker} was not started: {placement.slot_name} is held by worker {holder[1]} of "
                f"{holder[0]}"
            )
            self._list_as_gone(job, placement, message, now)
            return []
        self.workers[job, placement.worker] = Worker(placement.slot)
        place = self._gang_place(allocation, placement) if allocation.gang else None
        return [StartWorker(job, placement.worker, placement.slot, place)]

    def _gang_place(self, allocation: Allocation, placement: Placement) -> GangPlace:
        here = list(self._placed_here(allocation))
        return GangPlace(
            rank=allocation.placements.index(placement),
            size=len(allocation.placements),
            local_rank=here.index(placement),
            local_size=len(here),
            local_slots=tuple(each.slot for each in here),
        )

    def _list_as_gone(self, job: str, placement: Placement, message: str, now: float) -> None:
        exit_ = WorkerExit(kind="abandoned", message=message)
        self.workers[job, placement.worker] = Worker(placement.slot, "gone", exit=exit_, ended=now)

    def _on_record(self, record: AllocationGone | HostRecord) -> list[Command]:
        if isinstance(record, AllocationGone):
            self._allocations.pop(record.job, None)
            return self._kill_all(record.job)
        if record.host != self.host or record.incarnation < self.incarnation:
            return []
        if record.incarnation > self.incarnation:
            reason = f"another agent runs as host {self.host}: give this one another name (--host)"
            return [EndIncarnation(reason, is_superseded=True)]
        self.is_registered = True
        if record.state in _GONE:
            reason = f"incarnation {self.incarnation} is {record.state} in the registry: {record.reason}"
            return [EndIncarnation(reason)]
        return []

    def _on_instruction(
        self, instruction: AssignJobs | StopWorkers | PauseWorkers | SendHeartbeat, now: float
    ) -> list[Command]:
        match instruction:
            case AssignJobs():
                return self._on_assign(instruction)
            case StopWorkers():
                return self._on_stop(instruction, now)
            case PauseWorkers(job=job, lineage=lineage):
                return self._send(job, Pause(lineage=lineage))
            case SendHeartbeat(incarnation=incarnation):
                return self._heartbeat(now) if incarnation == self.incarnation else []

    def _on_assign(self, assign: AssignJobs) -> list[Command]:
        if assign.incarnation != self.incarnation:
            return []
        self._assigned = frozenset(assign.jobs)
        watches, known = self._update_watches(), self._environments
        if known is None or tuple(known) == assign.environments:
            return watches
        self._environments = {job: known.get(job) or EnvironmentReport(job=job) for job in assign.environments}
        return [*watches, PrepareEnvironments(assign.environments)]

    def _on_environment(self, report: EnvironmentReport, now: float) -> list[Command]:
        if not self._environments or report.job not in self._environments:
            return []
        self._environments[report.job] = report
        return self._heartbeat(now)

    def _update_watches(self) -> list[Command]:
        """Watch the allocations of the jobs that concern this host, and of no others."""
        living = {job for (job, _), worker in self.workers.items() if worker.state != "gone"}
        before, self._watched = self._watched, (self._assigned or frozenset()) | living
        ended, begun = sorted(before - self._watched), sorted(self._watched - before)
        for job in ended:
            self._allocations.pop(job, None)
        return [*map(UnwatchAllocation, ended), *map(WatchAllocation, begun)]

    def _on_stop(self, stop: StopWorkers, now: float) -> list[Command]:
        """Kill workers. A stop is repeated until a heartbeat lists them as gone, so only a change sends a heartbeat."""
        if stop.incarnation != self.incarnation:
            return []
        unknown = [number for number in stop.workers if (stop.job, number) not in self.workers]
        for number in unknown:
            exit_ = WorkerExit(kind="not started", message="it was stopped before it started")
            self.workers[stop.job, number] = Worker(0, "gone", exit=exit_, ended=now)
        return [*self._kill(stop.job, stop.workers), *(self._heartbeat(now) if unknown else [])]

    def _on_message(self, job: str, message: FromWorker, now: float) -> list[Command]:
        worker = self.workers[job, message.worker]
        if worker.state == "gone":
            return []
        before = (worker.state, worker.address, worker.generation)
        self._apply(job, message, worker)
        changed = before != (worker.state, worker.address, worker.generation)
        beat = self._heartbeat(now) if changed else []
        match message:
            case WorkerListening():
                order = _order(self._allocations.get(job))
                return [*beat, *([SendToWorker(job, message.worker, order)] if order else [])]
            case Imported(modules=modules):
                return self._templates.on_imported(job, modules, now)
            case Joined() | Trained() | Finished() | ChangeTraced():
                return beat
            case Warned():
                return [*self._reports.warn(job, message, worker, now=now)]
            case _:
                return [*beat, *self._reports.report(job, message, worker, now=now)]

    def _apply(self, job: str, message: FromWorker, worker: Worker) -> None:
        match message:
            case WorkerListening(host=host, port=port):
                worker.address = worker.address or Address(host=host, port=port)
            case Ready() if worker.state == "starting":
                worker.state = "ready"
            case Joined(generation=generation, iteration=iteration):
                self._enter_generation(job, message.worker, generation, iteration)
            case Switched(workers=members, generation=generation, iteration=iteration):
                for number in members:
                    self._enter_generation(job, number, generation, iteration)
            case Progress(iteration=iteration):
                worker.iteration = iteration
            case Left(iteration=iteration):
                worker.state, worker.iteration = "left", iteration
            case _:
                pass

    def _enter_generation(self, job: str, number: int, generation: int, iteration: int) -> None:
        worker = self.workers.get((job, number))
        if worker and worker.state in ("starting", "ready", "member"):
            worker.state, worker.generation, worker.iteration = "member", generation, iteration

    def _on_exit(self, job: str, number: int, exit_: WorkerExit, now: float) -> list[Command]:
        worker = self.workers[job, number]
        worker.state, worker.exit, worker.ended = "gone", exit_, now
        self._templates.on_exit(job, number)
        return [*self._reports.take_progress(job), *self._heartbeat(now), *self._update_watches()]

    def _on_tick(self, tick: Tick, now: float) -> list[Command]:
        self._is_bus_up, self._num_waiting = tick.is_bus_up, tick.num_waiting
        self._forget_workers(now)
        for key, in_flight in tick.in_flight.items():
            if worker := self.workers.get(key):
                worker.in_flight = in_flight
        commands: list[Command] = [*self._reports.take_all_progress()]
        commands += self._templates.on_tick(self._watched, now)
        return [*commands, *self._announce(now), *self._heartbeat(now)]

    def _announce(self, now: float) -> list[Command]:
        if self.is_registered or not self._is_bus_up or now < self._announce_due or self._templates.is_restoring(now):
            return []
        self._announce_due = now + self._announce_pause
        self._announce_pause = min(2 * self._announce_pause, MAX_ANNOUNCE_SECONDS)
        return [AnnounceHost()]

    def _heartbeat(self, now: float) -> list[Command]:
        if not self._is_bus_up:
            return []
        self._num_beats += 1
        beat = Heartbeat(
            host=self.host,
            incarnation=self.incarnation,
            number=self._num_beats,
            num_waiting=self._num_waiting,
            jobs=None if self._assigned is None else tuple(sorted(self._assigned)),
            workers=tuple(worker_reports(self.workers)),
            environments=None if self._environments is None else tuple(self._environments.values()),
        )
        return [beat]

    def _forget_workers(self, now: float) -> None:
        """Remove the workers that are gone, were listed long enough, and are no longer named."""
        for (job, number), worker in list(self.workers.items()):
            if worker.state != "gone" or now - worker.ended < LISTED_SECONDS:
                continue
            if all(placement.worker != number for placement in self._placed_here(self._allocations.get(job))):
                del self.workers[job, number]
                if all(other != job for other, _ in self.workers):
                    self._reports.forget(job)

    def _placed_here(self, allocation: Allocation | None) -> Iterator[Placement]:
        for placement in allocation.placements if allocation else ():
            if (placement.host, placement.incarnation) == (self.host, self.incarnation):
                yield placement

    def _living(self, job: str) -> Iterator[tuple[int, Worker]]:
        for (other, number), worker in self.workers.items():
            if other == job and worker.state != "gone":
                yield number, worker

    def _send(self, job: str, message: Order | Pause) -> list[Command]:
        """Send to the workers of ``job`` that are connected; the others receive the newest order once they are."""
        return [SendToWorker(job, number, message) for number, worker in self._living(job) if worker.address]

    def _kill_all(self, job: str) -> list[Command]:
        return self._kill(job, [number for number, _ in self._living(job)])

    def _kill(self, job: str, numbers: Iterable[int]) -> list[Command]:
        commands: list[Command] = []
        for number in numbers:
            worker = self.workers[job, number]
            if worker.state != "gone" and not worker.is_killed:
                worker.is_killed = True
                commands.append(KillWorker(job, number))
        return commands


def _order(allocation: Allocation | None) -> Order | None:
    """Return the order that an allocation amounts to; None until every address is known."""
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
        lineage=allocation.lineage,
        cold_start=allocation.cold_start,
        resume=allocation.resume,
        checkpoint=allocation.checkpoint,
        is_recovery=allocation.is_recovery,
        not_before=allocation.not_before,
        until=allocation.until,
        batch_size=allocation.batch_size,
    )
