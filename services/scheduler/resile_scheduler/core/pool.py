"""The hosts, the jobs, and which worker holds which slot.

A worker holds its slot from the moment an allocation names it until its process is gone and no generation that is
active, or may still become so, names it. No other worker gets the slot before.
"""

from dataclasses import dataclass, field
from functools import cached_property

from resile_shared.messages.hosts import HostRecord, HostState
from resile_shared.messages.jobs import JobRecord

from .job import Job
from .placement import SlotId
from .worker import Phase, Worker


@dataclass
class Host:
    """One host. ``is_heard``: its workers are known from a heartbeat, so its free slots are really free."""

    record: HostRecord
    is_heard: bool
    beat: int = -1
    num_waiting: int = 0
    """Facts that its agent has not published yet, by its newest heartbeat."""
    has_lost_fork_server: bool = False
    assigned: frozenset[str] | None = None
    """The jobs whose allocations its agent watches, by its newest heartbeat or what was sent since; None: unknown."""

    @property
    def is_usable(self) -> bool:
        """Whether it takes workers."""
        return self.record.state is HostState.UP

    @property
    def is_alive(self) -> bool:
        """Whether it can run workers, if only until they have left."""
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
    """All hosts, all jobs, and which worker holds which slot."""

    hosts: dict[str, Host] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    holders: dict[SlotId, tuple[str, int]] = field(default_factory=dict)
    applied_commands: dict[str, str] = field(default_factory=dict)
    """Ids of handled commands, and their jobs."""
    last_number: int = 0
    """The highest number that a job has had."""
    num_added: int = 0
    """Jobs that were ever added here."""
    has_changed: bool = False
    """Whether a decision is due."""
    cause: str = ""
    """What happened, in words for the history of the other jobs that it moves."""
    causer: str = ""
    """The job to which it happened, if it did to one."""

    def changed(self, cause: str = "", *, by: str = "") -> None:
        """Request a decision."""
        self.has_changed = True
        if cause:
            self.cause, self.causer = cause, by

    def take_change(self) -> tuple[str, str]:
        """Return, once, what has changed, and the job to which it happened; both may be empty."""
        change = self.cause, self.causer
        self.has_changed, self.cause, self.causer = False, "", ""
        return change

    def add_job(self, record: JobRecord) -> Job:
        """Add a job."""
        job = self.jobs[record.job] = Job(record, number=self.num_added)
        self.num_added += 1
        self.last_number = max(self.last_number, number_of(record.job))
        return job

    def add_worker(self, job: Job, worker: Worker) -> None:
        """Add ``worker`` as the holder of its slot."""
        assert worker.slot not in self.holders, f"{worker.slot.name} is held by {self.holders[worker.slot]}"
        job.workers[worker.number] = worker
        self.holders[worker.slot] = (job.id, worker.number)

    def advance(self, job: Job, worker: Worker, phase: Phase) -> None:
        """Record that ``worker`` has reached ``phase``."""
        if phase is Phase.LEFT and worker.phase < phase and job.generations.is_recovering:
            self.changed()
        worker.advance(phase)

    def release(self, job: Job) -> None:
        """Free the slots of workers that are gone and that no active or ordered generation names."""
        named = set() if job.is_over else job.generations.named
        for worker in list(job.workers.values()):
            if worker.phase is Phase.GONE and worker.number not in named:
                del job.workers[worker.number]
                del self.holders[worker.slot]
                self.changed()

    def free_slots(self) -> frozenset[SlotId]:
        """Return the slots on which a worker may be started now."""
        unreconciled = frozenset().union(*(job.generations.unreconciled_slots for job in self.jobs.values()))
        return frozenset(
            slot
            for host in self.hosts.values()
            if host.is_usable and host.is_heard
            for slot in host.slots
            if slot not in self.holders and not (unreconciled and slot.name in unreconciled)
        )

    def jobs_with_slots(self) -> tuple[str, ...]:
        """Return the jobs that have workers now, or will when those are started."""
        return tuple(job.id for job in self.jobs.values() if job.generations.placements and not job.is_over)

    def held_on(self, host: str) -> list[tuple[Job, Worker]]:
        """Return the workers that hold slots of one host, and their jobs."""
        held = [self.holders[slot] for slot in self.hosts[host].slots if slot in self.holders]
        return [(self.jobs[job], self.jobs[job].workers[number]) for job, number in held]


def number_of(job: str) -> int:
    """Return the number in ``job-1``, ``job-2``, ..., and 0 for another id."""
    number = job.removeprefix("job-")
    return int(number) if number.isdecimal() and number != job else 0
