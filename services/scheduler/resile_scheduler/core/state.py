"""What the scheduler knows: hosts, jobs, workers, and who holds which slot.

- A slot is held from the moment an allocation names a worker on it until that worker's process is gone and no
  generation names the worker that is in force or may still be. Nobody else gets it before.
- Worker ids rise within their job and are never used again; a worker that an allocation drops is never named again.
"""

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import cached_property

from resile_shared.messages.allocations import Allocation, Placement
from resile_shared.messages.hosts import Address, HostRecord, HostState
from resile_shared.messages.jobs import HistoryItem, JobRecord, JobState
from resile_shared.messages.message import at
from resile_shared.messages.reports import Evidence

from .lifecycle import Step, advance
from .placement import SlotId

BACKOFF_SECONDS = 5.0
MAX_BACKOFF_SECONDS = 300.0


class Phase(IntEnum):
    """How far a worker has come; it never goes back, so reports may come late, twice and in any order."""

    STARTING = 0
    READY = 1
    MEMBER = 2
    LEFT = 3
    GONE = 4


@dataclass
class Worker:
    """A worker whose slot is not released yet."""

    number: int
    slot: SlotId
    incarnation: int
    named_at: float
    phase: Phase = Phase.STARTING
    address: Address | None = None
    was_seen: bool = False
    """A heartbeat listed it, be it to an earlier scheduler: its address came in one."""
    failure: str = ""
    """The kind of its bad end, if it had one."""
    status: int = 0
    """Its exit status, or minus the signal that killed it."""
    reason: str = ""
    """Its bad end, in words."""
    is_lost: bool = False
    """It failed as a member."""
    is_fenced: bool = False
    """A recovering generation goes on without it."""
    has_finished: bool = False
    is_stopped: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether it cannot go on."""
        return bool(self.failure)

    @property
    def may_be_at_fault(self) -> bool:
        """Whether its end may be its script's doing: neither the loss of a host nor a kill from outside is."""
        is_from_outside = self.failure == "killed" and self.status == -signal.SIGKILL
        return self.has_failed and self.failure != "abandoned" and not is_from_outside

    @property
    def is_sound(self) -> bool:
        """Whether it has the state of its job, and can go on with it."""
        can_go_on = not (self.has_failed or self.is_fenced)
        return self.phase is Phase.MEMBER and can_go_on and self.address is not None


class Intent(StrEnum):
    """What the scheduler wants of a job that holds workers; noted in the history, where a restart finds it."""

    TRAIN = "training"
    PAUSE = "pausing"  # until somebody asks for it again
    SUSPEND = "suspending"  # until there are slots for it again


@dataclass
class HostBackoff:
    """A host on which a worker of a job failed, and until when the job does not try it again."""

    until: float
    times: int


@dataclass(frozen=True)
class LinkWait:
    """Since when all joiners of ``generation`` are ready, and which iteration it was then."""

    generation: int
    since: float
    iteration: int


Pair = tuple[int, int]
"""Two workers."""


@dataclass
class Accusation:
    """One worker's word against another: since when, and when it was said last."""

    since: float
    latest: float = float("-inf")
    evidence: Evidence = "broken link"


@dataclass
class Job:
    """One job. ``record`` and ``allocation`` are stored; the rest is what workers and agents report again and again.

    A scheduler that starts anew tries backoffs hosts again at once, which costs one start.
    """

    record: JobRecord
    number: int
    allocation: Allocation | None = None
    active: tuple[Placement, ...] = ()
    active_since: int = 0
    """The first iteration of the generation in force."""
    active_until: int | None = None
    """The iteration at which its members wait for the next one."""
    orders: dict[int, Allocation] = field(default_factory=dict)
    """Generations that were ordered and are in force or may still be."""
    workers: dict[int, Worker] = field(default_factory=dict)
    iteration: int = 0
    intent: Intent = Intent.TRAIN
    target: int = 0
    is_exact: bool = False
    """Whether no other number of workers will do."""
    unreconciled_slots: frozenset[str] = frozenset()
    """Slots in force according to the history, as long as an earlier scheduler's generation is and its workers are not
    known."""
    cause: str = ""
    """Why the target is what it is."""
    first_ready: int | None = None
    """The worker whose training call the others are compared with; None if an earlier scheduler heard it."""
    change_reason: str = ""
    """What just happened to the job itself; its next generation is the answer to it."""
    backoffs: dict[str, HostBackoff] = field(default_factory=dict)
    link_wait: LinkWait | None = None
    accusations: dict[Pair, Accusation] = field(default_factory=dict)
    """What waiting members say: who accuses whom. They say it again, also to the next scheduler."""
    vanished: str = ""
    """That somebody is lost of whom nothing is known but the accusation of its peers."""
    reported_generation: tuple[int, float] = (0, 0.0)
    """A generation that a heartbeat names as trained and nobody reported, and since when."""
    ended_at: float | None = None
    """When all members were gone, as far as is known, though none reported a result."""
    pause_sent: float = float("-inf")
    stored: JobRecord | None = None
    written: Allocation | None = None

    @property
    def id(self) -> str:
        """The job's id."""
        return self.record.job

    @property
    def is_over(self) -> bool:
        """Whether its state is final."""
        return self.record.state.is_final

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The newest membership that it shall have."""
        return self.allocation.placements if self.allocation else ()

    @property
    def has_started(self) -> bool:
        """Whether the founding generation of its present life trains."""
        allocation = self.allocation
        if allocation is None or not allocation.placements:
            return False
        return not allocation.cold_start or allocation.generation <= self.record.generation

    @property
    def is_settling(self) -> bool:
        """Whether its newest generation is not in force yet."""
        return self.allocation is not None and self.allocation.generation > self.record.generation

    @property
    def is_recovering(self) -> bool:
        """Whether a recovering generation is not in force yet: until it is, only a newer one may be written over it."""
        return self.is_settling and self.allocation is not None and self.allocation.is_recovery

    @property
    def is_cold_starting(self) -> bool:
        """Whether its founders have their order: until they train, nothing newer may be written over it."""
        allocation = self.allocation
        return (
            allocation is not None
            and bool(allocation.placements)
            and (not self.has_started and allocation.has_addresses)
        )

    @property
    def is_training(self) -> bool:
        """Whether it takes part in the sharing of slots."""
        waits = (JobState.PAUSED, JobState.ACCEPTED)
        return not (self.is_over or self.record.state in waits or self.record.completed) and (
            self.intent is Intent.TRAIN
        )

    @property
    def least_workers(self) -> int:
        """Its minimum; it never needs more workers than it has shards."""
        ready, least = self.record.ready, self.record.spec.min_workers
        return min(least, ready.num_shards) if ready else least

    @property
    def joiners(self) -> frozenset[int]:
        """Workers of the newest membership that do not train yet, as far as is known."""
        members = {placement.worker for placement in self.active}
        return frozenset(
            p.worker
            for p in self.placements
            if p.worker not in members and (w := self.workers.get(p.worker)) and w.phase < Phase.MEMBER
        )

    @property
    def named(self) -> set[int]:
        """The workers of every generation that is in force, may be by now, or shall be."""
        orders = (order.placements for order in self.orders.values())
        return {p.worker for membership in (self.active, self.placements, *orders) for p in membership}

    @property
    def held(self) -> dict[int, SlotId]:
        """The workers of the newest membership that have not failed, and their slots, in rank order."""
        return {
            p.worker: SlotId(p.host, p.slot)
            for p in self.placements
            if (worker := self.workers.get(p.worker)) and not worker.has_failed
        }

    def names(self, number: int) -> bool:
        """Whether the newest membership has this worker."""
        return any(placement.worker == number for placement in self.placements)

    def unneeded(self, workers: Iterable[Worker]) -> list[Worker]:
        """Return those of ``workers`` that nobody needs and that have no other way to learn so.

        Members leave by themselves, after their last iteration, unless their job recovers without them; a joiner that
        was ordered may become a member until a generation without it is in force.
        """
        alive = [worker for worker in workers if worker.phase < Phase.GONE]
        if self.is_over or not self.placements:
            return alive
        waiting = [worker for worker in alive if worker.is_fenced or worker.phase < Phase.MEMBER]
        if not waiting:
            return []
        needed = {placement.worker for placement in self.active} if self.record.completed else self.named
        return [worker for worker in waiting if worker.is_fenced or worker.number not in needed]

    def update(self, **changes: object) -> None:
        """Change the record."""
        self.record = self.record.model_copy(update=changes)

    def enter(self, step: Step) -> None:
        """Change the state. Raises IllegalStep."""
        self.update(state=advance(self.record.state, step))

    def back_off(self, host: str, *, now: float) -> None:
        """Keep off ``host`` for a while, longer each time."""
        times = self.backoffs[host].times + 1 if host in self.backoffs else 1
        self.backoffs[host] = HostBackoff(now + min(BACKOFF_SECONDS * 2 ** (times - 1), MAX_BACKOFF_SECONDS), times)

    def intend(self, intent: Intent, reason: str, *, now: float) -> None:
        """End the job's training for now, as soon as a checkpoint is saved."""
        self.intent = intent
        self.note(intent.value, reason, now=now)

    def recall_intent(self) -> None:
        """Find in the history what an earlier scheduler intended."""
        kinds = [item.kind for item in reversed(self.record.history)]
        ends = {Intent.PAUSE.value, Intent.SUSPEND.value, JobState.PAUSED.value, JobState.QUEUED.value}
        last = next((kind for kind in kinds if kind in ends), None)
        if last in (Intent.PAUSE.value, Intent.SUSPEND.value):
            self.intent = Intent(last)

    def note(self, kind: str, reason: str, *, now: float, iteration: int | None = None) -> None:
        """Add a numbered item to the history."""
        item = HistoryItem(
            number=len(self.record.history) + 1,
            time=at(now),
            kind=kind,
            generation=self.record.generation,
            workers=len(self.active),
            slots=tuple(placement.slot_name for placement in self.active),
            iteration=self.iteration if iteration is None else iteration,
            reason=reason,
        )
        self.update(history=(*self.record.history, item))


@dataclass
class Host:
    """One host. ``is_heard``: what runs on it is known, so its free slots are really free."""

    record: HostRecord
    is_heard: bool
    beat: int = -1

    @property
    def is_usable(self) -> bool:
        """Whether it takes workers."""
        return self.record.state is HostState.UP

    @property
    def is_alive(self) -> bool:
        """Whether it can run workers, be it only until they have left."""
        return self.record.state in (HostState.UP, HostState.DRAINING)

    @cached_property
    def slots(self) -> tuple[SlotId, ...]:
        """Its slots, whether or not they are held."""
        return tuple(SlotId(self.record.host, slot.index) for slot in self.record.slots)

    def fits(self, group: str) -> bool:
        """Whether it has the labels that ``group`` names, as in ``gpu=h200,zone=a``."""
        wanted = (part.partition("=") for part in group.split(",") if part)
        return all(self.record.labels.get(name.strip()) == value.strip() for name, _, value in wanted)


@dataclass
class Pool:
    """All hosts, all jobs, and who holds which slot."""

    hosts: dict[str, Host] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    holders: dict[SlotId, tuple[str, int]] = field(default_factory=dict)
    applied_commands: dict[str, str] = field(default_factory=dict)
    """Ids of handled commands, and their jobs."""
    has_changed: bool = False
    """Whether there is something new to decide upon."""
    cause: str = ""
    """What happened, in words for the history of the other jobs that it moves."""
    causer: str = ""
    """The job to which it happened, if it did to one."""

    def changed(self, cause: str = "", *, by: str = "") -> None:
        """Ask for a decision."""
        self.has_changed = True
        if cause:
            self.cause, self.causer = cause, by

    def add_worker(self, job: Job, worker: Worker) -> None:
        """Take ``worker`` in as the holder of its slot."""
        assert worker.slot not in self.holders, f"{worker.slot.name} is held by {self.holders[worker.slot]}"
        job.workers[worker.number] = worker
        self.holders[worker.slot] = (job.id, worker.number)

    def release(self, job: Job) -> None:
        """Free the slots of workers that are gone and that no generation names that is in force or may be."""
        named = set() if job.is_over else job.named
        for worker in list(job.workers.values()):
            if worker.phase is Phase.GONE and worker.number not in named:
                del job.workers[worker.number]
                del self.holders[worker.slot]
                self.changed()

    def is_free(self, slot: SlotId) -> bool:
        """Whether a worker may be started on it now."""
        host = self.hosts[slot.host]
        if not (host.is_usable and host.is_heard) or slot in self.holders:
            return False
        return not any(job.unreconciled_slots and slot.name in job.unreconciled_slots for job in self.jobs.values())

    def held_on(self, host: str) -> list[tuple[Job, Worker]]:
        """Who holds the slots of one host."""
        held = [self.holders[slot] for slot in self.hosts[host].slots if slot in self.holders]
        return [(self.jobs[job], self.jobs[job].workers[number]) for job, number in held]
