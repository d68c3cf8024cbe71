"""A pool in memory: the real scheduler and the real agents, with workers that only answer; no process, no clock."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from resile.local.host import SLOTS_PER_WORKER
from resile.local.in_memory import Command, Event, HostCommand, HostEvent, HostFailed, InMemoryPool, StartTimer
from resile_learner.agent import events as agent
from resile_learner.messages import (
    FromWorker,
    Joined,
    Left,
    Order,
    Pause,
    PeerSuspected,
    Ready,
    Switched,
    WorkerListening,
)
from resile_scheduler.core import events as scheduler
from resile_scheduler.core.core import Scheduler
from resile_scheduler.policies.plan import PlanPolicy, PlanStep
from resile_shared.messages.commands import JobPause
from resile_shared.messages.hosts import HostHello, Slot, WorkerExit
from resile_shared.messages.jobs import HistoryItem, JobRecord, JobSpec, JobState
from resile_shared.version import VERSION

JOB = "job-1"
SHARDS = 24


@dataclass
class World:
    """A pool and its workers: each worker is where it is after it has answered all that it was sent."""

    pool: InMemoryPool
    now: float = 1000.0
    iteration: int = 0
    record: JobRecord | None = None
    history: list[HistoryItem] = field(default_factory=list)
    alive: dict[int, tuple[str, int]] = field(default_factory=dict)
    members: tuple[int, ...] = ()
    pauses: list[int] = field(default_factory=list)
    timers: list[scheduler.Event] = field(default_factory=list)
    is_silent: set[int] = field(default_factory=set)
    """Frozen workers: they answer nothing, and can still be killed."""
    ends_slowly: bool = False
    """Whether processes have not ended yet when they have left, or were killed."""
    ending: list[Event] = field(default_factory=list)
    """The ends of these processes."""

    def send(self, *events: Event) -> None:
        """Let events happen, and all that workers answer to what follows from them."""
        for event in events:
            for command in self.pool.handle(event, now=self.now):
                self.send(*self.answer(command))

    def answer(self, command: Command) -> list[Event]:
        match command:
            case scheduler.StoreJob(record, items):
                self.record = record
                self.history += items
            case StartTimer(_, event):
                self.timers.append(event)
            case HostCommand(host, incarnation, agent.StartWorker(_, worker)):
                self.alive[worker] = (host, incarnation)
                return [self.message(WorkerListening(worker=worker, host="h", port=1000 + worker)), self.ready(worker)]
            case HostCommand(_, _, agent.KillWorker(_, worker)) if worker in self.alive:
                return self.end(self.exited(worker, "killed", -9))
            case HostCommand(_, _, agent.SendToWorker(_, worker, message)) if worker not in self.is_silent:
                return list(self.answer_message(worker, message))
        return []

    def answer_message(self, worker: int, message: Order | Pause) -> Iterator[Event]:
        if isinstance(message, Pause):
            self.pauses.append(worker)
        elif worker == message.workers[0] and message.workers != self.members:
            leavers = [n for n in self.members if n in self.alive and n not in message.workers]
            self.members = message.workers
            at = {"generation": message.generation, "iteration": max(self.iteration, message.not_before)}
            self.iteration = at["iteration"]
            yield self.message(Switched(worker=worker, workers=message.workers, **at))
            yield from (self.message(Joined(worker=n, **at)) for n in message.workers[1:])
            for leaver in set(leavers) - self.is_silent if not message.is_recovery else ():
                yield self.message(Left(worker=leaver, **at))
                yield from self.end(self.exited(leaver, "left"))

    def end(self, exited: Event) -> list[Event]:
        self.ending += [exited] * self.ends_slowly
        return [] if self.ends_slowly else [exited]

    def message(self, message: FromWorker) -> Event:
        return HostEvent(*self.alive[message.worker], agent.MessageReceived(JOB, message))

    def ready(self, worker: int) -> Event:
        return self.message(
            Ready(worker=worker, iterations_total=100, num_shards=SHARDS, batch_size=192, epochs=1, samples=192,
                  bits="same bits")
        )  # fmt: skip

    def exited(self, worker: int, kind: str, status: int = 0) -> Event:
        exit_ = WorkerExit.model_validate({"kind": kind, "status": status})
        return HostEvent(*self.alive.pop(worker), agent.WorkerExited(JOB, worker, exit_))

    @property
    def state(self) -> JobState:
        assert self.record is not None
        return self.record.state

    @property
    def reasons(self) -> list[str]:
        assert self.record is not None
        return [f"{item.kind}: {item.reason}" for item in self.history]


def hello(host: str, slots: int, incarnation: int = 1, gpus: int = 0) -> HostHello:
    return HostHello(
        host=host,
        incarnation=incarnation,
        address="h",
        slots=tuple(Slot(index=index, device=f"cuda:{index % gpus}" if gpus else "cpu") for index in range(slots)),
        device_class="cpu",
        version=VERSION,
    )


def submitted(workers: int) -> scheduler.JobSubmitted:
    spec = JobSpec(name="train", package="packages/1", script="train.py", max_workers=workers)
    return scheduler.JobSubmitted("submit", spec, job=JOB)


def training(*slots: int, workers: int = 4) -> World:
    """A job that trains on hosts with these numbers of slots."""
    world = World(InMemoryPool(Scheduler(secret="s")))
    world.send(*(hello(f"host-{number}", count) for number, count in enumerate(slots, start=1)), submitted(workers))
    assert world.state is JobState.RUNNING
    return world


def test_a_job_starts_and_a_killed_worker_is_replaced() -> None:
    world = training(2, 2)
    assert world.members == (0, 1, 2, 3)
    world.send(world.exited(1, "killed", -9))
    assert world.members == (0, 4, 2, 3), "the new one beside the other worker of its host"
    assert "allocation: worker 1 on host-1/1 was killed by SIGKILL (Killed)" in world.reasons


def test_a_failed_host_costs_its_workers_and_its_next_incarnation_gets_new_ones() -> None:
    world = training(2, 2)
    for worker in (2, 3):
        del world.alive[worker]
    world.send(HostFailed("host-2", "power cut"))
    assert world.members == (0, 1)
    world.send(hello("host-2", 2, incarnation=2))
    assert world.members == (0, 1, 4, 5)


def test_a_frozen_worker_is_killed_once_its_agent_has_answered_a_probe() -> None:
    world = training(3, workers=3)
    world.is_silent.add(2)
    for accuser in (0, 1):
        suspected = PeerSuspected(worker=accuser, generation=1, suspect=2, evidence="silence", reason="")
        world.send(world.message(suspected))
    assert 2 in world.alive, "others have a moment to say what they hear"
    (expired,) = set(world.timers)
    world.send(expired)
    assert 2 not in world.alive
    assert world.members == (0, 1, 3)


def test_a_pause_reaches_every_worker() -> None:
    world = training(2, 1)
    world.send(scheduler.JobChangeRequested("pause", JobPause(job_id=JOB)))
    assert sorted(world.pauses) == [0, 1, 2]


def test_a_plan_is_followed_by_the_same_cores() -> None:
    steps = tuple(PlanStep(iteration, workers) for iteration, workers in ((0, 1), (10, 3), (20, 2)))
    world = World(InMemoryPool(Scheduler(secret="s", policy=PlanPolicy(steps))))
    world.send(hello("local", 6), submitted(3))
    assert world.record is not None
    sizes = [(item.iteration, item.workers) for item in world.history if item.kind == "allocation"]
    assert sizes == [(0, 1), (10, 3), (20, 2)]


def on_gpus(*steps: tuple[int, int], num: int) -> World:
    """A local run by a plan, on a host with ``num`` accelerators and twice as many slots as workers."""
    plan = PlanPolicy(tuple(PlanStep(iteration, workers) for iteration, workers in steps))
    world = World(InMemoryPool(Scheduler(secret="s", policy=plan)))
    workers = max(workers for _, workers in steps)
    world.ends_slowly = True
    world.send(hello("local", SLOTS_PER_WORKER * workers, gpus=num), submitted(workers))
    return world


def devices_of(world: World, num: int) -> list[int]:
    """The accelerators of the newest generation, by rank."""
    newest = [item for item in world.history if item.kind == "allocation"][-1]
    return [int(slot.rpartition("/")[2]) % num for slot in newest.slots]


def test_a_run_that_shrinks_and_grows_uses_all_devices_though_the_process_of_the_leaver_has_not_ended() -> None:
    world = on_gpus((0, 2), (10, 1), (20, 2), num=2)
    assert [item.workers for item in world.history if item.kind == "allocation"] == [2, 1, 2]
    assert world.ending, "the worker that left still holds its slot"
    assert sorted(devices_of(world, 2)) == [0, 1]


@pytest.mark.parametrize("lost", range(3))
def test_the_worker_that_replaces_another_uses_its_device_even_while_that_one_is_ending(lost: int) -> None:
    world = on_gpus((0, 3), num=3)
    world.is_silent.add(lost)
    accusers = [worker for worker in range(3) if worker != lost]
    for accuser in accusers:
        suspected = PeerSuspected(worker=accuser, generation=1, suspect=lost, evidence="silence", reason="")
        world.send(world.message(suspected))
    world.send(*set(world.timers))
    assert world.ending, "the frozen worker still holds its slot"
    assert set(world.members) == {*accusers, 3}
    assert sorted(devices_of(world, 3)) == [0, 1, 2]


def test_a_host_gets_more_slots_without_a_new_incarnation() -> None:
    world = training(1)
    world.send(hello("host-1", 3))
    assert world.members == (0, 1, 2)


def test_what_happened_to_an_earlier_incarnation_has_no_effect() -> None:
    world = training(2, workers=2)
    exits = [world.exited(worker, "abandoned") for worker in (0, 1)]
    world.send(HostFailed("host-1", "killed"), hello("host-1", 2, incarnation=2))
    members = world.members
    assert members == (2, 3)
    world.send(*exits)
    assert world.members == members
    assert world.state is JobState.RUNNING
