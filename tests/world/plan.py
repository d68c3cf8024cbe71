"""What happens in a world: its shape, its jobs, what users do, and the faults.

A plan is data, so that a failing one can be cut shorter.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from .packages import SimPackages
from .training import SimScript

LONGEST_SECONDS = 50.0
"""Virtual time within which all faults and actions of a plan begin."""

FAULTS = (
    "crash scheduler",
    "crash registry",
    "crash agent",
    "crash host",
    "kill worker",
    "freeze scheduler",
    "freeze registry",
    "freeze agent",
    "freeze worker",
    "freeze host",
    "restart bus",
    "lose unsynced",
    "cut bus",
    "cut bus upwards",
    "cut bus downwards",
    "slow bus",
    "overload bus",
    "cut host",
    "cut pair",
    "cut pair one way",
    "cut data links",
    "cut control links",
    "reset links",
    "reset data links",
    "slow links",
    "cut storage",
    "storage fails",
    "slow storage",
    "ambiguous storage",
    "stale storage",
    "full storage",
    "damaged storage",
    "step clock",
    "lose messages",
    "refuse job",
)
LOSSES = (
    "kill worker",
    "kill worker",
    "freeze worker",
    "crash agent",
    "reset links",
    "reset data links",
    "cut pair",
    "cut pair one way",
    "cut data links",
    "cut control links",
    "slow links",
)
"""Of these, those that workers meet alone. Some plans have no others, so that one comes while another is dealt with."""
ACTIONS = ("pause", "resume", "stop", "priority", "drain", "submit again", "restart pool")
SHARING = ("policy", "preemption", "tenant")
"""Actions that change how the pool shares its slots."""
CRITICAL = ("policy", "policy", "preemption", "tenant", "tenant", "cap", "cap", "delete tenant", "priority")
"""Actions that change what a scheduler decides by, some of them just when it decides, stores or starts something."""
REMOVALS = ("delete", "delete", "settings", "tenant", "delete tenant", "stop")
"""Actions that remove jobs, hosts and tenants, and that change for how long the pool keeps what has ended."""

TRIGGERS = (
    "write",
    "allocation",
    "report",
    "worker starts",
    "last iteration",
    "completion",
    "pause",
    "load",
    "checkpoint",
    "model",
)
"""What some faults wait for, to begin at once when it happens: a write of a scheduler, its storing of an allocation, a
report, the start of a worker's process, a member's last iteration, its completion, the storing of a part of the
checkpoint of a pause or of another one, the reading of the last part of one, and the storing of a final model. What
acts on one process acts on the one that has just done that, if it is of its kind."""
CRITICAL_TRIGGERS = ("sharing", "sharing", "settings", "write", "allocation", "removal")
"""What faults wait for in worlds with `CRITICAL` actions. Three are only there: a scheduler's storing of the policy or
of tenants, the registry's storing of the pool's settings, and the removal of the record of a job."""
RARE = ("completion", "pause", "load", "checkpoint", "model")
"""Of these, those that happen a few times in a world: a fault waits for them from early on."""


@dataclass(frozen=True)
class Theme:
    """What happens in a world, when it is not anything: these meet each other then, again and again."""

    faults: tuple[str, ...]
    triggers: tuple[str, ...]
    actions: tuple[str, ...]
    is_narrow: bool = False
    """Whether all of its worlds have all of these, and not some."""
    seconds: tuple[float, ...] = (0.05, 0.5, 2.0, 5.0, 15.0)
    """About how long its faults last."""
    saves_often: bool = False
    """Whether its jobs save a checkpoint every few iterations."""
    has_long_jobs: bool = False
    """Whether its jobs are few and long, with several workers."""
    num_faults: int = 0
    num_actions: int = 0
    """How often users act at least."""
    num_hosts: int = 1
    """How many hosts there are at least."""


ANYTHING = Theme(FAULTS, ("", *TRIGGERS), ACTIONS)
THEMES = (
    ANYTHING,
    Theme(LOSSES, ("", "", "last iteration", "worker starts"), ("priority",)),
    Theme(  # pauses
        ("slow storage", "storage fails", "kill worker", "crash agent", "crash scheduler", "cut bus", "lose messages"),
        ("", "checkpoint", "report", "pause"),
        ("pause", "resume", "priority", "restart pool"),
        has_long_jobs=True,
        num_actions=2,
    ),
    Theme(  # pauses that meet losses
        ("kill worker",),
        ("pause",),
        ("pause", "pause", "priority"),
        is_narrow=True,
        has_long_jobs=True,
        num_faults=2,
        num_actions=3,
    ),
    Theme(  # the last seconds of jobs
        ("crash agent", "kill worker", "freeze worker", "cut bus", "crash scheduler", "crash host", "reset data links"),
        ("last iteration", "model", "report", "completion"),
        ("priority",),
    ),
    Theme(  # losses after the completion
        ("reset data links", "reset data links", "crash host", "kill worker"),
        ("completion",),
        ("priority",),
        is_narrow=True,
        has_long_jobs=True,
        num_faults=1,
    ),
    Theme(  # results that wait behind other reports
        ("overload bus", "overload bus", "restart bus"),
        ("",),
        ("priority",),
        is_narrow=True,
        seconds=(15.0, 30.0),
        saves_often=True,
        num_faults=1,
    ),
    Theme(  # members that are cut off from the bus and not from storage
        ("cut bus", "cut bus", "crash agent"),
        ("", "checkpoint", "checkpoint"),
        ("priority",),
        is_narrow=True,
        seconds=(5.0, 15.0),
        saves_often=True,
        has_long_jobs=True,
        num_faults=2,
        num_hosts=2,
    ),
    Theme(  # cold starts
        ("crash agent", "kill worker", "freeze host", "cut pair", "cut storage", "stale storage", "crash host"),
        ("", "worker starts", "checkpoint", "allocation", "load"),
        ("pause", "resume", "drain"),
    ),
    Theme(  # cold starts whose checkpoints are damaged while they are read
        ("damaged storage",),
        ("load",),
        ("restart pool", "pause", "resume"),
        is_narrow=True,
        saves_often=True,
        has_long_jobs=True,
        num_faults=2,
        num_actions=2,
    ),
    Theme(  # records that the bus does not store
        ("refuse job", "refuse job", "crash scheduler"),
        ("", "write", "allocation"),
        ("priority", "pause", "resume"),
        seconds=(5.0, 15.0),
        num_faults=2,
        num_actions=2,
    ),
    Theme(  # the schedulers
        ("crash scheduler", "freeze scheduler", "cut bus", "slow bus", "restart bus", "lose messages", "crash agent"),
        ("write", "allocation", "report"),
        ("pause", "stop", "priority", "submit again"),
    ),
    Theme(  # hosts that come and go
        ("crash host", "crash agent", "freeze host", "freeze agent", "cut host", "crash registry", "lose messages"),
        ("", "worker starts", "allocation"),
        ("drain", "stop", "priority"),
    ),
    Theme(  # pools that end
        ("slow storage", "kill worker", "crash scheduler"),
        ("", "pause"),
        ("restart pool",),
        seconds=(0.05, 0.5, 2.0),
        has_long_jobs=True,
        num_actions=1,
    ),
)


@dataclass(frozen=True)
class Submission:
    """A job that a user submits."""

    at: float
    script: SimScript
    min_workers: int
    max_workers: int
    priority: int
    packages: SimPackages | None = None
    """None: it requires none."""
    group: str = ""
    """The labels that its hosts must have; empty: it may use all hosts."""
    tenant: str = "default"
    sizes: tuple[int, ...] = ()
    """The allowed numbers of workers; empty: any."""
    deadline_seconds: float | None = None
    """How long after its submission it should be complete; None: it has no deadline."""

    gang: bool = False
    """Whether it is a gang of `max_workers`, whose script knows nothing of Resile."""
    restartable: bool = False
    """Of a gang: whether it may start again."""

    @property
    def is_missing(self) -> bool:
        """Whether it requires packages that do not exist."""
        return self.packages is not None and self.packages.is_missing

    @property
    def seconds(self) -> float:
        """What its training takes about, without faults and alone."""
        script = self.script
        shards = max(1, script.num_shards // self.max_workers)
        return script.import_seconds + script.iterations * shards * script.shard_seconds


@dataclass(frozen=True)
class Action:
    """What a user does to job or host ``target``, a number that is taken modulo how many there are."""

    at: float
    kind: str
    target: int
    value: int = 0
    trigger: str = ""
    """As of a `Fault`."""


@dataclass(frozen=True)
class Fault:
    """Something bad that begins ``at`` and lasts for ``seconds``; ``target`` as in `Action`, ``number`` as it needs."""

    at: float
    kind: str
    target: int
    seconds: float
    number: int
    trigger: str = ""
    """One of `TRIGGERS`: it begins when that happens first after ``at``. Empty: at once."""

    def __str__(self) -> str:
        when = f" at the next {self.trigger}" if self.trigger else ""
        return f"{self.at:7.3f} {self.kind}{when} target={self.target} seconds={self.seconds:.1f} number={self.number}"


@dataclass(frozen=True)
class Plan:
    """All that is drawn from one seed."""

    seed: int
    slots: tuple[int, ...]
    num_schedulers: int
    policy: str
    jobs: tuple[Submission, ...]
    actions: tuple[Action, ...]
    faults: tuple[Fault, ...]
    calm_at: float
    """When the faults cease: also when fewer of them are left."""
    kinds: tuple[int, ...] = ()
    """The kind of each host: those of different kinds give different bits. Empty: all are of one."""
    labels: tuple[str, ...] = ()
    """The labels of each host. Empty: none has any."""
    removes: bool = False
    """Whether its users remove jobs, and its pool keeps little of what has ended and of hosts that have left."""
    keeps_policy: bool = False
    """Whether schedulers that are started again use the policy that is stored, not the plan's."""

    def first(self, num_faults: int) -> "Plan":
        """The same plan with its first faults only."""
        return replace(self, faults=self.faults[:num_faults])

    def reduced(self, fails: Callable[["Plan"], bool]) -> "Plan":
        """The same plan without the faults and actions that it does not need to fail."""
        plan = self
        for name in ("faults", "actions"):
            for item in getattr(self, name):
                smaller = replace(plan, **{name: tuple(other for other in getattr(plan, name) if other is not item)})
                if fails(smaller):
                    plan = smaller
        return plan


def broke_once() -> tuple[Plan, ...]:
    """Return the plans of worlds that broke a promise at some time, as they were drawn then."""
    return TypeAdapter(tuple[Plan, ...]).validate_json((Path(__file__).parent / "broke_once.json").read_bytes())
