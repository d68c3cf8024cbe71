"""The definition of attacks: kinds, targets, and valid combinations. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from resile_shared.errors import UsageError


class AttackKind(StrEnum):
    """What an attack does."""

    KILL = "kill"
    FREEZE = "freeze"
    SLOW = "slow"
    PARTITION = "partition"
    SLOW_LINK = "slow-link"
    DISK_FULL = "disk-full"
    CORRUPT = "corrupt"

    @property
    def lasts(self) -> bool:
        """Whether it lasts for some seconds, and is then undone."""
        return self not in (AttackKind.KILL, AttackKind.CORRUPT)


class TargetKind(StrEnum):
    """What an attack hits."""

    WORKER = "worker"
    JOB = "job"
    AGENT = "agent"
    HOST = "host"
    REGISTRY = "registry"
    SCHEDULER = "scheduler"
    MONITOR = "monitor"
    BUS = "bus"
    OBJECT_STORE = "object-store"

    @property
    def is_service(self) -> bool:
        """Whether it is a service of the pool."""
        return self in SERVICES

    @property
    def is_of_job(self) -> bool:
        """Whether the name of the target is that of a job."""
        return self in (TargetKind.WORKER, TargetKind.JOB)

    @property
    def is_of_host(self) -> bool:
        """Whether the name of the target is that of a host."""
        return self in (TargetKind.AGENT, TargetKind.HOST)


SERVICES = (TargetKind.REGISTRY, TargetKind.SCHEDULER, TargetKind.MONITOR, TargetKind.BUS)
PROCESS_KINDS = (AttackKind.KILL, AttackKind.FREEZE, AttackKind.SLOW)
_TO_LINKS = (AttackKind.PARTITION, AttackKind.SLOW_LINK)
_TO_STORAGE = (AttackKind.DISK_FULL, AttackKind.CORRUPT)


@dataclass(frozen=True)
class Target:
    """The target of an attack. ``name``: a job with the number of a worker (``job-1/3``), a job, or a host."""

    what: TargetKind
    name: str = ""

    def __str__(self) -> str:
        return f"{self.what} {self.name}".rstrip()

    @property
    def job(self) -> str:
        """The job in ``name``, if there is one."""
        return self.name.partition("/")[0]


@dataclass(frozen=True)
class Attack:
    """One attack. ``seconds`` is how long it lasts; ``rate`` is that of a slow link, in the units of `tc`."""

    kind: AttackKind
    target: Target
    seconds: float = 0.0
    rate: str = "5mbit"

    def __str__(self) -> str:
        return f"{self.kind} {self.target}" + (f" for {self.seconds:g} s" if self.kind.lasts else "")


def check(kind: AttackKind, what: TargetKind) -> None:
    """Raise UsageError with the reason if the combination is invalid."""
    if reason := refusal(kind, what):
        raise UsageError(f"{kind} {what}: {reason}")


def refusal(kind: AttackKind, what: TargetKind) -> str:
    """Return why the combination is invalid, empty if it is valid."""
    if kind in _TO_STORAGE:
        return "" if what is TargetKind.OBJECT_STORE else f"only the object-store can be attacked with {kind}"
    if kind in _TO_LINKS and what in (TargetKind.WORKER, TargetKind.JOB, TargetKind.AGENT):
        return "links belong to hosts: attack the host"
    if kind in _TO_LINKS and what is TargetKind.OBJECT_STORE:
        return "the store is not part of the pool and has no link to cut: kill or freeze its process"
    return ""


def parse(what: TargetKind, name: str) -> Target:
    """Parse the target that a user names. Raises UsageError."""
    if what.is_service and name:
        raise UsageError(f"there is only one {what}: omit {name}")
    if what.is_of_job and not name:
        raise UsageError(f"the {what} needs the name of a job: `{what} job-1`, or `worker job-1/3`")
    if what.is_of_host and not name:
        raise UsageError(f"the {what} needs the name of a host: `{what} host-1`; `resile hosts` lists them")
    if what is TargetKind.WORKER and "/" in name and not name.partition("/")[2].isdecimal():
        raise UsageError(f"{name} is not a worker: give the job and the number of the worker, as in job-1/3")
    return Target(what, name)
