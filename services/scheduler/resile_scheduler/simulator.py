"""The scheduler's core in virtual time: jobs of known length on simulated hosts, no process and no clock.

The same core runs live. Here its commands move simulated workers, which start, join at a boundary, train and leave like
real ones, and tell the core so. An iteration takes ``ceil(num_shards / workers)`` times the job's ``shard_seconds``.
"""

import heapq
import signal
from collections import deque
from collections.abc import Callable, Iterable

from resile_shared.messages.allocations import Allocation
from resile_shared.messages.hosts import Address, Heartbeat, HostRecord, HostState, Slot, WorkerExit, WorkerReport
from resile_shared.messages.jobs import JobRecord
from resile_shared.messages.message import at
from resile_shared.messages.reports import CheckpointSaved, Completed, Content, PeerSuspected, Report, Switched

from .core.core import Scheduler
from .core.events import (
    Command,
    Event,
    JobSubmitted,
    PauseWorkers,
    ProbeExpired,
    ProbeHost,
    StateRestored,
    StopWorkers,
    StoreJob,
    Tick,
    WriteAllocation,
)
from .core.policies import Policy, fairshare
from .simulated import SimulatedWorker, Submission, Training

FORK_SECONDS = 0.03
SCRIPT_SECONDS = 0.8
EXIT_SECONDS = 0.05
LISTED_SECONDS = 10.0
DETECTION_SECONDS = 3.0


class Simulator:
    """A pool in virtual time. ``now`` and what was stored can be read at any moment between two steps."""

    def __init__(self, *, policy: Policy = fairshare, start: float = 1_000_000.0) -> None:
        self.now = start
        self.start = start
        self._epoch = 1
        self._policy = policy
        self.scheduler = Scheduler(epoch=1, secret="simulated", policy=policy)
        self.records: dict[str, JobRecord] = {}
        self.allocations: list[Allocation] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._num_queued = 0
        self._jobs: dict[str, Training] = {}
        self._hosts: dict[str, HostRecord] = {}
        self._silent: set[str] = set()
        self._beats = 0
        self._events: deque[Event] = deque()
        self.channel: Callable[[Event], Iterable[Event]] = lambda event: (event,)
        """What becomes of a heartbeat or report on its way."""

    # what the user of the simulator does

    def add_host(self, name: str, slots: int, *, device_class: str = "cpu", incarnation: int = 1) -> None:
        """Let a host join now."""
        record = HostRecord(
            host=name,
            incarnation=incarnation,
            state=HostState.UP,
            address="10.0.0.1",
            slots=tuple(Slot(index=index) for index in range(slots)),
            device_class=device_class,
            since=at(self.now),
        )
        self._hosts[name] = record
        self._silent.discard(name)
        self.tell(record)

    def change_host(self, name: str, state: HostState) -> None:
        """Let a host drain, leave or be lost now; in the last two cases its workers die."""
        self._hosts[name] = self._hosts[name].model_copy(update={"state": state, "since": at(self.now)})
        if state in (HostState.LOST, HostState.LEFT):
            self._end_workers(name)
        self.tell(self._hosts[name])

    def crash(self, name: str) -> None:
        """Let a host fall silent now, with all its workers; it is held to be lost when it has been silent for long."""
        self._silent.add(name)
        self._end_workers(name)
        self.later(DETECTION_SECONDS, lambda: self._is_lost(name))

    def _is_lost(self, host: str) -> None:
        if host in self._silent:
            self.change_host(host, HostState.LOST)

    def _end_workers(self, host: str) -> None:
        for training in self._jobs.values():
            training.workers = {n: w for n, w in training.workers.items() if w.host != host}

    def kill(self, job: str, worker: int, *, kind: str = "killed") -> None:
        """Let a worker die now; if it is a member, the round that is under way is never finished."""
        self._exit(self._jobs[job], worker, kind)

    def submit(self, submissions: Iterable[Submission]) -> None:
        """Let jobs come at their times."""
        for submission in submissions:
            self.later(self.start + submission.time - self.now, lambda s=submission: self._submit(s))  # type: ignore[misc]

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something ``seconds`` from now."""
        self._num_queued += 1
        heapq.heappush(self._queue, (self.now + max(seconds, 0.0), self._num_queued, action))

    def tell(self, event: Event) -> list[Command]:
        """Hand an event to the core, and carry out its commands; what happens meanwhile is told afterwards."""
        self._events.append(event)
        if len(self._events) > 1:
            return []
        commands: list[Command] = []
        while self._events:
            told = self.scheduler.handle(self._events[0], now=self.now)
            commands += told
            for command in told:
                self._obey(command)
            self._events.popleft()
        return commands

    def restart_scheduler(self) -> None:
        """Let a new scheduler take over from what is stored."""
        self._epoch += 1
        self.scheduler = Scheduler(epoch=self._epoch, secret="simulated", policy=self._policy)
        newest = {allocation.job: allocation for allocation in self.allocations}
        self.tell(StateRestored(tuple(self.records.values()), tuple(newest.values()), tuple(self._hosts.values())))

    def step(self) -> bool:
        """Let the next thing happen; False if there is none."""
        if not self._queue:
            return False
        time, _, action = heapq.heappop(self._queue)
        self.now = max(self.now, time)
        action()
        return True

    def run(self, *, until: float = float("inf"), watch: Callable[[], None] = lambda: None) -> None:
        """Go on until nothing is left to happen, or until ``until`` seconds after the start; ``watch`` each step."""
        while self._queue and self._queue[0][0] <= self.start + until:
            self.step()
            watch()

    def members(self, job: str) -> tuple[int, ...]:
        """The workers that train this job now."""
        return self._jobs[job].members if job in self._jobs else ()

    def living(self, job: str) -> tuple[int, ...]:
        """The workers of this job whose processes are there."""
        return tuple(self._jobs[job].workers) if job in self._jobs else ()

    def trained(self, job: str) -> set[int]:
        """The workers that ever were members."""
        return self._jobs[job].trained

    def iteration(self, job: str) -> int:
        """How many iterations its members have committed."""
        return self._jobs[job].iteration

    # what the core commands

    def _obey(self, command: Command) -> None:
        match command:
            case StoreJob(record):
                self.records[record.job] = record
            case WriteAllocation(allocation):
                self.allocations.append(allocation)
                self._allocate(self._jobs[allocation.job], allocation)
            case StopWorkers(job=job, host=host, workers=workers):
                for number in workers:
                    self.later(EXIT_SECONDS, lambda n=number: self._stopped(job, host, n))  # type: ignore[misc]
            case PauseWorkers(job=job):
                self._jobs[job].shall_pause = True
            case ProbeHost(host, incarnation, beat, seconds):
                self._beat(host)
                unanswered = ProbeExpired(host, incarnation, beat)
                self.later(seconds, lambda: self._tell(unanswered))

    def _tell(self, event: Event) -> None:
        self.tell(event)

    def _submit(self, submission: Submission) -> None:
        self._jobs[submission.job] = Training(submission)
        self.tell(JobSubmitted(f"submit {submission.job}", submission.spec, job=submission.job))

    def _allocate(self, training: Training, allocation: Allocation) -> None:
        """Do what the agents do: start the workers that are new; hand the order to all."""
        before = {placement.worker for placement in training.allocation.placements} if training.allocation else set()
        is_new_life = allocation.cold_start and before.isdisjoint(
            placement.worker for placement in allocation.placements
        )
        if is_new_life or not allocation.placements:
            training.members, training.orders, training.shall_pause = (), [], False
            training.life += 1
            training.iteration = training.checkpoint if allocation.resume else 0
            training.is_complete = False
        training.allocation = allocation
        for placement in allocation.placements:
            if placement.worker not in training.started:
                training.started.add(placement.worker)
                self._check_is_free(placement.host, placement.slot)
                training.workers[placement.worker] = SimulatedWorker(placement.host, placement.slot)
                self.later(FORK_SECONDS, lambda n=placement.worker: self._listens(training, n))  # type: ignore[misc]
        if allocation.is_recovery:
            self._recover(training, allocation)
        elif allocation.placements and allocation.has_addresses:
            training.orders.append(allocation)
            self._found(training)

    def _check_is_free(self, host: str, slot: int) -> None:
        running = [w for training in self._jobs.values() for w in training.workers.values()]
        assert not any((w.host, w.slot) == (host, slot) for w in running), f"{host}/{slot} is held twice"

    def _recover(self, training: Training, order: Allocation) -> None:
        """Whoever sees the order leaves the round; it is begun anew as soon as all whom it names are known to live."""
        named = tuple(placement.worker for placement in order.placements)
        if training.is_complete or order.generation <= training.generation:
            return
        if set(named) & set(training.members):
            training.life += 1
            training.orders = []
        if set(named) <= set(training.members) & training.workers.keys():
            self._switch(training, order, leave=False)
            self._train(training)
        else:
            self._accuse(training, training.life)

    def _accuse(self, training: Training, life: int) -> None:
        """Let members that wait for one that is gone say so, and say it again as long as they wait."""
        living = [number for number in training.members if number in training.workers]
        if life != training.life or training.is_complete or not training.missing or not living:
            return
        lost = PeerSuspected(suspect=training.missing[0], evidence="broken link", reason="")
        for number in living:
            if number in training.workers:
                self._report(training, number, lost)
        self.later(1.0, lambda: self._accuse(training, life))

    # what workers do

    def _listens(self, training: Training, number: int) -> None:
        if worker := training.workers.get(number):
            worker.address = Address(host="10.0.0.1", port=1000 + number)
            self.later(SCRIPT_SECONDS, lambda: self._is_ready(training, number))
            self._beat(worker.host)

    def _is_ready(self, training: Training, number: int) -> None:
        worker = training.workers.get(number)
        if worker is None:
            return
        worker.state = "ready"
        self._report(training, number, training.submission.ready())
        self._found(training)

    def _found(self, training: Training) -> None:
        if not training.members and (order := training.newest_formed()) and order.cold_start:
            self._switch(training, order)
            self._train(training)

    def _switch(self, training: Training, order: Allocation, *, leave: bool = True) -> None:
        leavers = set(training.members) - {p.worker for p in order.placements}
        training.members = tuple(p.worker for p in order.placements)
        training.trained |= set(training.members)
        training.generation = order.generation
        training.orders = [newer for newer in training.orders if newer.generation > order.generation]
        for number in training.members:
            training.workers[number].state = "member"
            training.workers[number].generation = order.generation
        self._report(training, training.members[0], Switched(workers=training.members, iteration=training.iteration))
        for number in sorted(leavers) if leave else ():
            training.workers[number].state = "left"
            self.later(EXIT_SECONDS, lambda n=number: self._exit(training, n, "left"))  # type: ignore[misc]

    def _train(self, training: Training) -> None:
        """One iteration, and then the boundary."""
        submission, life = training.submission, training.life
        shards = -(-submission.num_shards // len(training.members))
        self.later(shards * submission.shard_seconds, lambda: self._boundary(training, life))

    def _boundary(self, training: Training, life: int) -> None:
        if life != training.life or not training.members:
            return
        if training.missing:
            self._accuse(training, life)
            return
        training.iteration += 1
        every = training.submission.checkpoint_every
        if training.iteration >= training.submission.iterations:
            self._complete(training)
        elif training.shall_pause:
            training.checkpoint = training.iteration
            self._report(
                training, training.members[0], CheckpointSaved(iteration=training.iteration, num_bytes=1, pausing=True)
            )
        else:
            if every and training.iteration % every == 0:
                training.checkpoint = training.iteration
                saved = CheckpointSaved(iteration=training.iteration, num_bytes=1)
                self._report(training, training.members[0], saved)
            if order := training.newest_formed():
                self._switch(training, order)
            self._train(training)

    def _complete(self, training: Training) -> None:
        members, training.is_complete = training.members, True
        completed = Completed(
            iteration=training.iteration,
            epoch=0,
            samples_seen=0,
            loss=None,
            metrics={},
            validation={},
            params_sha256="0" * 64,
            model=None,
            ledger=(),
            bits="same bits",
        )
        self._report(training, members[0], completed)
        for number in members:
            self.later(EXIT_SECONDS, lambda n=number: self._exit(training, n, "finished"))  # type: ignore[misc]

    def _stopped(self, job: str, host: str, number: int) -> None:
        training = self._jobs[job]
        if number in training.workers:
            self._exit(training, number, "exited")
        else:
            gone = WorkerReport(job=job, worker=number, slot=0, state="gone", exit=WorkerExit(kind="not started"))
            self._beat(host, gone)

    def _exit(self, training: Training, number: int, kind: str) -> None:
        worker = training.workers.pop(number, None)
        if worker is None:
            return
        exit_ = WorkerExit.model_validate({"kind": kind, "status": -signal.SIGKILL if kind == "killed" else 0})
        gone = WorkerReport(job=training.submission.job, worker=number, slot=worker.slot, state="gone", exit=exit_)
        training.gone[number] = (worker.host, gone, self.now)
        self._beat(worker.host, gone)

    # what agents tell

    def _beat(self, host: str, *gone: WorkerReport) -> None:
        if host in self._silent:
            return
        self._beats += 1
        workers = [
            WorkerReport.model_validate(
                {
                    "job": name,
                    "worker": number,
                    "slot": worker.slot,
                    "state": worker.state,
                    "address": worker.address,
                    "generation": worker.generation,
                    "iteration": training.iteration,
                }
            )
            for name, training in self._jobs.items()
            for number, worker in training.workers.items()
            if worker.host == host
        ]
        lasting = [
            report
            for training in self._jobs.values()
            for number, (at_host, report, ended) in training.gone.items()
            if at_host == host and training.allocation and report not in gone
            if self.now - ended < LISTED_SECONDS
            or any(placement.worker == number for placement in training.allocation.placements)
        ]
        gone = (*gone, *lasting)
        record = self._hosts[host]
        beat = Heartbeat(host=host, incarnation=record.incarnation, number=self._beats, workers=(*workers, *gone))
        self._send(beat)

    def _report(self, training: Training, number: int, content: Content) -> None:
        worker = training.workers[number]
        report = Report(
            job=training.submission.job,
            host=worker.host,
            incarnation=self._hosts[worker.host].incarnation,
            worker=number,
            slot=worker.slot,
            generation=training.generation,
            time=at(self.now),
            content=content,
        )
        self._send(report)

    def _send(self, event: Event) -> None:
        for arriving in self.channel(event):
            self.tell(arriving)

    def beat_all(self) -> None:
        """Let every host beat now, and time pass for the core."""
        for name, record in self._hosts.items():
            if record.state in (HostState.UP, HostState.DRAINING):
                self._beat(name)
        self.tell(Tick())
