"""The hosts, the jobs, and which worker holds which slot.

A worker holds its slot from the moment an allocation names it until its process is gone and no generation that is
active, or may still become so, names it. No other worker gets the slot before.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from resile_shared.messages.hosts import EnvironmentReport, HostRecord, HostState
from resile_shared.messages.jobs import JobRecord

from .job import Job
from .slot_sets import SlotId, SlotsByHost
from .topology import Domain, domain_of
from .worker import Phase, Worker


class Cause(NamedTuple):
    """What happened, in words for the histories of jobs other than ``job``, to which it happened; empty: to none."""

    text: str
    job: str = ""


@dataclass
class Host:
    """One host. ``is_heard``: its workers are known from a heartbeat, so its free slots are really free."""

    record: HostRecord
    is_heard: bool
    beat: int = -1
    num_waiting: int = 0
    """How many facts its agent had not published yet when it sent its newest heartbeat."""
    has_lost_fork_server: bool = False
    watched: frozenset[str] | None = None
    """The jobs whose allocations its agent watches, by its newest heartbeat or what was sent since; None: unknown."""
    assigned: frozenset[str] | None = None
    """The jobs that were assigned to it last; None: nothing was sent yet."""
    prepares: tuple[str, ...] = ()
    """The jobs whose environments its agent must have, by its newest heartbeat or what was sent since."""
    environments: Mapping[str, EnvironmentReport] | None = None
    """The state of its environments, by job; None: its agent reports none, and builds them when workers start."""

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

    @cached_property
    def shared_devices(self) -> Mapping[SlotId, str]:
        """The accelerator of each slot, if some have several slots; empty: each slot has its own, or CPU cores."""
        devices = {
            SlotId(self.record.host, slot.index): slot.device for slot in self.record.slots if slot.device != "cpu"
        }
        return devices if len({*devices.values()}) < len(devices) else {}

    def has(self, slot: SlotId) -> bool:
        """Whether ``slot`` is one of its own."""
        return slot in self._slots

    @cached_property
    def domain(self) -> Domain:
        """Where it is, by its labels."""
        return domain_of(self.record.labels)

    @cached_property
    def _slots(self) -> frozenset[SlotId]:
        return frozenset(self.slots)

    def has_environment(self, job: str) -> bool:
        """Whether the workers of ``job``, which requires packages, can start at once."""
        if self.environments is None:
            return True
        report = self.environments.get(job)
        return report is not None and report.state == "ready"

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
    """The ids of applied commands, each with its job."""
    last_number: int = 0
    """The highest number that a job has had."""
    num_added: int = 0
    """How many jobs were ever added."""
    has_changed: bool = False
    """Whether a decision is due."""
    causes: list[Cause] = field(default_factory=list)
    """What has happened since the last decision, each once, in order."""
    hosts_version: int = 0
    """A number that rises when what may be placed on hosts changes."""
    prepared: dict[str, set[str]] = field(default_factory=dict)
    """The hosts that have ever reported the environment of a job as ready, by job."""
    unreporting: set[str] = field(default_factory=set)
    """Hosts whose agents build environments when workers start, and report nothing of them."""
    _due: dict[str, Job] = field(default_factory=dict)
    _touched: dict[str, Job] = field(default_factory=dict)
    _touched_hosts: set[str] = field(default_factory=set)
    _free: SlotsByHost = field(default_factory=dict)
    _unheard: SlotsByHost = field(default_factory=dict)
    _stale: set[str] = field(default_factory=set)
    """Hosts whose entries in ``_free`` and ``_unheard`` have to be recomputed."""

    def with_environment(self, job: str) -> set[str]:
        """Return the hosts on which workers of ``job``, which requires packages, can start at once."""
        named = self.prepared.get(job, set()) | self.unreporting
        return {name for name in named if name in self.hosts and self.hosts[name].has_environment(job)}

    def forget_host(self, name: str) -> None:
        """Remove a host that has left for good."""
        self.hosts.pop(name, None)
        for prepared in (*self.prepared.values(), self.unreporting):
            prepared.discard(name)

    def changed(self, job: Job | None, cause: str = "", *, by: str = "") -> None:
        """Request a decision, in which ``job`` is looked at again."""
        self.has_changed = True
        if job is not None:
            self.touch(job)
        if cause and Cause(cause, by) not in self.causes:
            self.causes.append(Cause(cause, by))

    def touch(self, job: Job) -> None:
        """Let the next decision look at ``job`` again; what has changed in its record is stored."""
        self._due[job.id] = self._touched[job.id] = job

    def take_causes(self) -> list[Cause]:
        """Return, once, what has happened since the last decision; no other one is requested any more."""
        causes, self.causes, self.has_changed = self.causes, [], False
        return causes

    def take_due(self, others: Mapping[str, Job]) -> list[Job]:
        """Return, once, the jobs that were touched since the last decision, and ``others``, in their order.

        Decisions see how far jobs are only as they look at them again: progress alone is no reason to.
        """
        due, self._due = {**self._due, **others}, {}
        for job in due.values():
            job.iteration_seen = job.iteration
        return self._in_order(due)

    def take_touched(self, others: Iterable[str]) -> list[Job]:
        """Return, once, the jobs that were touched by an event, and those of ``others`` that exist, in their order."""
        touched, self._touched = self._touched, {}
        for name in others:
            if name in self.jobs:
                touched[name] = self.jobs[name]
        return self._in_order(touched)

    def _in_order(self, jobs: Mapping[str, Job]) -> list[Job]:
        known = (job for name, job in jobs.items() if name in self.jobs)
        return sorted(known, key=lambda job: job.number)

    def take_touched_hosts(self, others: Iterable[str]) -> list[Host]:
        """Return, once, the hosts whose slots may have new holders, and those of ``others`` that exist."""
        touched, self._touched_hosts = self._touched_hosts.union(others), set()
        return [self.hosts[name] for name in sorted(touched) if name in self.hosts]

    def add_job(self, record: JobRecord) -> Job:
        """Add a job."""
        job = self.jobs[record.job] = Job(record, number=self.num_added)
        self.num_added += 1
        self.last_number = max(self.last_number, number_of(record.job))
        self.touch(job)
        return job

    def put_host(self, host: Host) -> None:
        """Add ``host``, or replace what was known of it; the jobs that have workers there are looked at again."""
        name = host.record.host
        held = self.held_on(name) if name in self.hosts else []
        self.hosts[name] = host
        self.hosts_version += 1
        self._hold(name)
        for job, _ in (*held, *self.held_on(name)):
            self.touch(job)

    def hear(self, host: Host) -> None:
        """Record that the workers of ``host`` are known."""
        host.is_heard = True
        self._hold(host.record.host)
        for job, _ in self.held_on(host.record.host):
            self.touch(job)
        self.changed(None)

    def touch_host(self, name: str) -> None:
        """Request that what was assigned to host ``name`` is compared with what should be."""
        self._touched_hosts.add(name)

    def _hold(self, name: str) -> None:
        """Request that the free slots of host ``name`` are recomputed."""
        self._stale.add(name)
        self._touched_hosts.add(name)

    def add_worker(self, job: Job, worker: Worker) -> None:
        """Add ``worker`` as the holder of its slot."""
        assert worker.slot not in self.holders, f"{worker.slot.name} is held by {self.holders[worker.slot]}"
        job.workers[worker.number] = worker
        self.holders[worker.slot] = (job.id, worker.number)
        self._hold(worker.slot.host)
        self.touch(job)

    def advance(self, job: Job, worker: Worker, phase: Phase) -> None:
        """Record that ``worker`` has reached ``phase``."""
        if phase is Phase.LEFT and worker.phase < phase and job.generations.is_recovering:
            self.changed(job)
        worker.advance(phase)

    def release(self, job: Job) -> None:
        """Free the slots of workers that are gone and that no active or ordered generation names."""
        named = set() if job.is_over else job.generations.named
        for worker in list(job.workers.values()):
            if worker.phase is Phase.GONE and worker.number not in named:
                del job.workers[worker.number]
                del self.holders[worker.slot]
                self._hold(worker.slot.host)
                self.changed(job)

    def free_slots(self) -> SlotsByHost:
        """Return the slots that nobody holds, by host, of hosts that take workers and whose workers are known."""
        self._find_unheld()
        return self._free

    def unheard_slots(self) -> SlotsByHost:
        """Return the slots that nobody holds, as far as is known, of hosts that have not sent a heartbeat yet."""
        self._find_unheld()
        return self._unheard

    def _find_unheld(self) -> None:
        for name in self._stale:
            host = self.hosts.get(name)  # the registry may have removed it: then it has no slots
            unheld = sorted(slot for slot in host.slots if slot not in self.holders) if host and host.is_usable else []
            for of_hosts, is_heard in ((self._free, True), (self._unheard, False)):
                if host and unheld and host.is_heard is is_heard:
                    of_hosts[name] = unheld
                else:
                    of_hosts.pop(name, None)
        self._stale.clear()

    def is_usable(self, slot: SlotId) -> bool:
        """Whether a worker may be, or stay, on ``slot``."""
        host = self.hosts.get(slot.host)
        return host is not None and host.is_usable and host.has(slot)

    def is_free(self, slot: SlotId) -> bool:
        """Whether ``slot`` is one of `free_slots`."""
        return slot not in self.holders and self.is_usable(slot) and self.hosts[slot.host].is_heard

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
