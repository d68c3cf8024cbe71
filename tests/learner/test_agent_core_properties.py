"""Whatever happens in any order: no worker starts twice, or on a held slot; each fact is reported once.

The allocations of jobs that have a worker here are watched, and those of jobs that are not assigned have no effect.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from resile_learner.agent.core import AgentCore
from resile_learner.agent.events import (
    AllocationGone,
    Event,
    KillWorker,
    MessageReceived,
    SendToWorker,
    StartWorker,
    Tick,
    UnwatchAllocation,
    WatchAllocation,
    WorkerExited,
)
from resile_learner.messages import CheckpointSaved, FromWorker, Order, Progress, WorkerListening
from resile_shared.messages.allocations import Allocation, Placement
from resile_shared.messages.hosts import Address, Heartbeat, WorkerExit
from resile_shared.messages.instructions import AssignJobs, PauseWorkers, StopWorkers
from resile_shared.messages.reports import Progress as ReportedProgress
from resile_shared.messages.reports import Report

HOST, INCARNATION = "host-1", 2
JOBS = st.sampled_from(["job-1", "job-2"])
NUMBERS = st.integers(0, 3)
Key = tuple[str, int]


class AgentMachine(RuleBasedStateMachine):
    """A core, and the processes that its commands would have started."""

    def __init__(self) -> None:
        super().__init__()
        self.core = AgentCore(HOST, INCARNATION)
        self.now = 1000.0
        self.started: set[Key] = set()
        self.alive: dict[Key, bool] = {}  # whether it listens
        self.newest: dict[str, Allocation] = {}
        self.assigned: set[str] = set()
        self.watched: set[str] = set()
        self.dropped: set[Key] = set()
        self.slots: dict[Key, int] = {}
        self.epoch = 0
        self.facts_sent: list[tuple[str, int]] = []
        self.facts_reported: list[tuple[str, int]] = []
        self.progress_sent: dict[str, int] = {}
        self.progress_reported: dict[str, int] = {}
        self.beats: list[Heartbeat] = []

    def handle(self, event: Event) -> None:
        for command in self.core.handle(event, now=self.now):
            match command:
                case StartWorker(job, worker, slot):
                    assert (job, worker) not in self.started
                    assert slot not in {self.slots[key] for key in self.alive}, "no two workers are on one slot"
                    self.slots[job, worker] = slot
                    assert any(p.worker == worker and p.host == HOST for p in self.newest[job].placements)
                    self.started.add((job, worker))
                    self.alive[job, worker] = False
                case SendToWorker(job, worker, message):
                    assert self.alive[job, worker], "only connected workers receive messages"
                    if isinstance(message, Order):
                        assert message.generation == self.newest[job].generation
                case KillWorker(job, worker):
                    assert (job, worker) in self.alive
                case WatchAllocation() | UnwatchAllocation():
                    self.change_watch(command)
                case Heartbeat():
                    self.beats.append(command)
                case Report(content=ReportedProgress(iteration=iteration), job=job):
                    assert iteration > self.progress_reported.get(job, 0)
                    self.progress_reported[job] = iteration
                case Report(job=job, content=content):
                    assert self.progress_reported.get(job, 0) == self.progress_sent.get(job, 0), "progress comes first"
                    self.facts_reported.append((job, getattr(content, "iteration", 0)))
                case _:
                    pass

    def change_watch(self, command: WatchAllocation | UnwatchAllocation) -> None:
        match command:
            case WatchAllocation(job):
                assert job not in self.watched
                self.watched.add(job)
            case UnwatchAllocation(job):
                self.watched.remove(job)
                self.newest.pop(job, None)

    def receive(self, job: str, message: FromWorker) -> None:
        self.handle(MessageReceived(job, message))

    @initialize()
    def begin(self) -> None:
        self.assign({"job-1", "job-2"}, epoch=1)

    @rule(jobs=st.sets(JOBS), epoch=st.integers(1, 2))
    def assign(self, jobs: set[str], epoch: int) -> None:
        """Schedulers take a job from a host only when the stored allocation names no worker there."""
        if epoch >= self.epoch:
            self.epoch = epoch
            jobs |= {job for job, allocation in self.newest.items() if allocation.placements}
            self.assigned = jobs
        self.handle(AssignJobs(epoch=epoch, incarnation=INCARNATION, jobs=tuple(jobs)))

    @rule(job=JOBS, epoch=st.integers(1, 2), generation=st.integers(1, 5), here=st.sets(NUMBERS), named=st.booleans())
    def allocate(self, job: str, epoch: int, generation: int, here: set[int], named: bool) -> None:
        address = Address(host=HOST, port=1) if named else None
        known = self.newest.get(job)
        is_newer = known is None or known.generation <= generation or known.epoch < epoch
        is_newest = epoch >= self.epoch and is_newer and job in self.watched
        self.epoch = max(self.epoch, epoch)
        if is_newest:
            here -= {worker for other, worker in self.dropped if other == job}
            self.drop(job, keep=here)
        allocation = Allocation(
            job=job,
            epoch=epoch,
            generation=generation,
            placements=tuple(
                Placement(worker=worker, host=HOST, incarnation=INCARNATION, slot=worker, address=address)
                for worker in sorted(here)
            ),
            secret="s",
        )
        if is_newest:
            self.newest[job] = allocation
        self.handle(allocation)

    def drop(self, job: str, *, keep: set[int]) -> None:
        """Schedulers never name a worker again that they have dropped."""
        named = {placement.worker for placement in self.newest[job].placements} if job in self.newest else set()
        self.dropped |= {(job, worker) for worker in named - keep}

    @rule(job=JOBS)
    def forget(self, job: str) -> None:
        self.drop(job, keep=set())
        self.newest.pop(job, None)
        self.handle(AllocationGone(job))

    @rule(job=JOBS, workers=st.sets(NUMBERS, min_size=1), epoch=st.integers(1, 2))
    def stop(self, job: str, workers: set[int], epoch: int) -> None:
        self.epoch = max(self.epoch, epoch)
        self.handle(StopWorkers(epoch=epoch, job=job, incarnation=INCARNATION, workers=tuple(workers)))

    @rule(job=JOBS, epoch=st.integers(1, 2))
    def pause(self, job: str, epoch: int) -> None:
        self.epoch = max(self.epoch, epoch)
        self.handle(PauseWorkers(epoch=epoch, job=job, lineage=1))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def listen(self, data: st.DataObject) -> None:
        job, worker = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive[job, worker] = True
        self.receive(job, WorkerListening(worker=worker, host=HOST, port=1))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def progress(self, data: st.DataObject) -> None:
        job, worker = data.draw(st.sampled_from(sorted(self.alive)))
        iteration = self.progress_sent[job] = self.progress_sent.get(job, 0) + 1
        self.receive(job, Progress(worker=worker, generation=1, iteration=iteration, epoch=0))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def state_a_fact(self, data: st.DataObject) -> None:
        job, worker = data.draw(st.sampled_from(sorted(self.alive)))
        self.facts_sent.append((job, len(self.facts_sent)))
        self.receive(
            job,
            CheckpointSaved(lineage=1, worker=worker, generation=1, iteration=len(self.facts_sent) - 1, num_bytes=1),
        )

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def exit(self, data: st.DataObject) -> None:
        job, worker = data.draw(st.sampled_from(sorted(self.alive)))
        del self.alive[job, worker]
        self.handle(WorkerExited(job, worker, WorkerExit(kind="exited")))
        assert self.progress_reported.get(job, 0) == self.progress_sent.get(job, 0)

    @rule(is_bus_up=st.booleans(), seconds=st.floats(0.01, 20.0))
    def tick(self, is_bus_up: bool, seconds: float) -> None:
        self.now += seconds
        self.handle(Tick(is_bus_up))

    @invariant()
    def the_jobs_that_concern_the_host_are_watched_and_no_others(self) -> None:
        assert self.watched == self.assigned | {job for job, _ in self.alive}
        assert all(self.core.needs(job) == (job in self.watched) for job in ("job-1", "job-2"))

    @invariant()
    def every_fact_is_reported_once_and_in_order(self) -> None:
        assert self.facts_reported == self.facts_sent

    @invariant()
    def beats_are_numbered_and_list_all_living_workers(self) -> None:
        numbers = [beat.number for beat in self.beats]
        assert numbers == sorted(set(numbers))
        self.now += 1.0
        self.handle(Tick(is_bus_up=True))
        states = {(worker.job, worker.worker): worker.state for worker in self.beats[-1].workers}
        assert {key for key, state in states.items() if state != "gone"} == set(self.alive)
        for job, allocation in self.newest.items():
            assert all((job, placement.worker) in states for placement in allocation.placements)


AgentMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_the_core = AgentMachine.TestCase
