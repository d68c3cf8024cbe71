"""What an attack is: a kind, a target, and which of them go together. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from resile_shared.errors import UsageError


class Kind(StrEnum):
    """What is done."""

    KILL = "kill"
    FREEZE = "freeze"
    SLOW = "slow"
    PARTITION = "partition"
    SLOW_LINK = "slow-link"
    DISK_FULL = "disk-full"
    CORRUPT = "corrupt"

    @property
    def lasts(self) -> bool:
        """Whether it goes on for some seconds, and is undone then."""
        return self not in (Kind.KILL, Kind.CORRUPT)


class What(StrEnum):
    """To what it is done."""

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
        """Whether it is one process that the whole pool needs."""
        return self in SERVICES

    @property
    def is_of_job(self) -> bool:
        """Whether its name is that of a job."""
        return self in (What.WORKER, What.JOB)

    @property
    def is_of_host(self) -> bool:
        """Whether its name is that of a host."""
        return self in (What.AGENT, What.HOST)


SERVICES = (What.REGISTRY, What.SCHEDULER, What.MONITOR, What.BUS)
PROCESS_KINDS = (Kind.KILL, Kind.FREEZE, Kind.SLOW)
_TO_LINKS = (Kind.PARTITION, Kind.SLOW_LINK)
_TO_STORAGE = (Kind.DISK_FULL, Kind.CORRUPT)


@dataclass(frozen=True)
class Target:
    """Whom an attack hits. ``name``: a job with the number of a worker (``job-1/3``), a job, or a host."""

    what: What
    name: str = ""

    def __str__(self) -> str:
        return f"{self.what} {self.name}".rstrip()

    @property
    def job(self) -> str:
        """The job, where ``name`` has one."""
        return self.name.partition("/")[0]


@dataclass(frozen=True)
class Attack:
    """One attack. ``seconds`` is how long it lasts; ``rate`` is of a slow link, as `tc` has it."""

    kind: Kind
    target: Target
    seconds: float = 0.0
    rate: str = "5mbit"

    def __str__(self) -> str:
        return f"{self.kind} {self.target}" + (f" for {self.seconds:g} s" if self.kind.lasts else "")


def check(kind: Kind, what: What) -> None:
    """Raise UsageError, which says why, if there is no such attack."""
    if reason := refusal(kind, what):
        raise UsageError(f"{kind} {what}: {reason}")


def refusal(kind: Kind, what: What) -> str:
    """Return why there is no such attack, nothing if there is."""
    if kind in _TO_STORAGE:
        return "" if what is What.OBJECT_STORE else f"only the object-store can be attacked with {kind}"
    if kind in _TO_LINKS and what in (What.WORKER, What.JOB, What.AGENT):
        return "the network belongs to the host: attack that"
    if kind in _TO_LINKS and what is What.OBJECT_STORE:
        return "a store that is not part of the pool has no link that could be cut: kill or freeze its process"
    return ""


def parse(what: What, name: str) -> Target:
    """Return the target that a user names. Raises UsageError."""
    if what.is_service and name:
        raise UsageError(f"there is one {what}: leave out {name}")
    if what.is_of_job and not name:
        raise UsageError(f"name the job whose {what} it shall be: `{what} job-1`, or `worker job-1/3`")
    if what.is_of_host and not name:
        raise UsageError(f"name the host: `{what} host-1`; `resile hosts` lists them")
    if what is What.WORKER and "/" in name and not name.partition("/")[2].isdecimal():
        raise UsageError(f"{name} is not a worker: write the job and the number of the worker, as in job-1/3")
    return Target(what, name)
