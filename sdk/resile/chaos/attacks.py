"""The definition of attacks: kinds, targets, and valid combinations. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from resile_shared.errors import UsageError


class AttackKind(StrEnum):
    """What an attack does."""

    KILL = "kill"
    TERMINATE = "terminate"
    FREEZE = "freeze"
    SLOW = "slow"
    PARTITION = "partition"
    SLOW_LINK = "slow-link"
    DISK_FULL = "disk-full"
    CORRUPT = "corrupt"
    UNMOUNT = "unmount"
    LIMIT_FILES = "limit-files"
    CUT_PEER = "cut-peer"
    CUT_ONE_WAY = "cut-one-way"
    CUT_BUS = "cut-bus"
    DUPLICATE = "duplicate"
    KILL_LATE = "kill-late"
    PAUSE = "pause"
    STOP = "stop"
    DRAIN = "drain"
    PRIORITY = "priority"

    @property
    def lasts(self) -> bool:
        """Whether it lasts for some seconds, and is then undone."""
        return self not in _AT_ONCE

    @property
    def kills(self) -> bool:
        """Whether it kills processes."""
        return self in (AttackKind.KILL, AttackKind.KILL_LATE)

    @property
    def is_request(self) -> bool:
        """Whether it is a request that a user could make: nothing breaks, but it comes at a bad moment."""
        return self in REQUESTS

    @property
    def cuts(self) -> bool:
        """Whether it is done to the network."""
        return self in _TO_LINKS


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
PROCESS_KINDS = (
    *(AttackKind.KILL, AttackKind.KILL_LATE, AttackKind.TERMINATE, AttackKind.FREEZE, AttackKind.SLOW),
    *(AttackKind.UNMOUNT, AttackKind.LIMIT_FILES),
)
REQUESTS = (AttackKind.PAUSE, AttackKind.STOP, AttackKind.DRAIN, AttackKind.PRIORITY)
_AT_ONCE = (
    *(AttackKind.KILL, AttackKind.KILL_LATE, AttackKind.TERMINATE),
    *(AttackKind.CORRUPT, AttackKind.STOP, AttackKind.PRIORITY),
)
_BETWEEN_HOSTS = (AttackKind.CUT_PEER, AttackKind.CUT_ONE_WAY, AttackKind.CUT_BUS)
_TO_LINKS = (AttackKind.PARTITION, AttackKind.SLOW_LINK, *_BETWEEN_HOSTS)
_LATE_TARGETS = (TargetKind.WORKER, TargetKind.JOB, TargetKind.HOST, TargetKind.SCHEDULER, TargetKind.BUS)
_ONE_TARGET = {
    AttackKind.CORRUPT: TargetKind.OBJECT_STORE,
    AttackKind.UNMOUNT: TargetKind.JOB,
    AttackKind.LIMIT_FILES: TargetKind.WORKER,
    **dict.fromkeys(_BETWEEN_HOSTS, TargetKind.HOST),
    **dict.fromkeys((AttackKind.PAUSE, AttackKind.STOP, AttackKind.PRIORITY), TargetKind.JOB),
    AttackKind.DRAIN: TargetKind.HOST,
    AttackKind.DUPLICATE: TargetKind.SCHEDULER,
}
"""The only possible target of some kinds of attack."""


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
    other: str = ""
    """The part of the network from which a host is cut off; empty: from all."""
    priority: int = 0
    """The new priority of the job, for an attack that changes it."""

    def __str__(self) -> str:
        other = f" from {self.other}" if self.other else ""
        return f"{self.kind} {self.target}{other}" + (f" for {self.seconds:g} s" if self.kind.lasts else "")


def check(kind: AttackKind, what: TargetKind) -> None:
    """Raise UsageError with the reason if the combination is invalid."""
    if reason := refusal(kind, what):
        raise UsageError(f"{kind} {what}: {reason}")


def refusal(kind: AttackKind, what: TargetKind) -> str:
    """Return why the combination is invalid, empty if it is valid."""
    if kind in _ONE_TARGET:
        return "" if what is _ONE_TARGET[kind] else f"only the {_ONE_TARGET[kind]} can be attacked with {kind}"
    if kind is AttackKind.DISK_FULL and what not in (TargetKind.OBJECT_STORE, TargetKind.BUS):
        return "only the disks of the object-store and of the bus can be filled"
    if kind is AttackKind.TERMINATE and what in (TargetKind.BUS, TargetKind.OBJECT_STORE):
        return "it ends at SIGTERM, as it should: kill it"
    if kind is AttackKind.KILL_LATE and what not in _LATE_TARGETS:
        return "it does nothing special in the last seconds of a job"
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


MENU = tuple((kind, what) for kind in AttackKind for what in TargetKind if not refusal(kind, what))
"""All valid combinations of an attack and a target."""


def check_name(name: str) -> None:
    """Raise UsageError unless ``name`` is that of a valid combination, as in "kill job"."""
    names = [f"{kind} {what}" for kind, what in MENU]
    if name not in names:
        raise UsageError(f"{name!r} is not an attack: choose from {', '.join(names)}")
