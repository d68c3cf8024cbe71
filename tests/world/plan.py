"""What happens in a world, drawn from its seed before it begins: its shape, its jobs, what users do, and the faults.

A plan is data, so that a failing one can be cut shorter.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
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


def draw(seed: int) -> Plan:
    """Draw the plan of ``seed``. Some plans are mild: what goes wrong without faults must be found as well."""
    rng = random.Random(f"{seed} plan")
    theme = rng.choice(THEMES)
    slots = tuple(rng.choice((1, 2, 2, 3, 4)) for _ in range(max(theme.num_hosts, rng.choice((1, 2, 2, 3)))))
    kinds = tuple(rng.choice((0, 1)) for _ in slots) if rng.random() < 0.15 else (0,) * len(slots)
    room = max(sum(n for n, kind in zip(slots, kinds, strict=True) if kind == one) for one in kinds)
    are_short = rng.random() < 0.3 and not theme.has_long_jobs  # many jobs in a row on the same slots
    most = (1, 1, 2) if theme.has_long_jobs else (1, 1, 2, 2, 3, 5)
    num_jobs = rng.choice((4, 6, 8)) if are_short else rng.choice(most)
    jobs = tuple(_submission(rng, room, theme, is_short=are_short) for _ in range(num_jobs))
    jobs = _with_packages(seed, jobs, len(slots))
    labels = _labels(seed, len(slots))
    jobs = _with_groups(seed, jobs, slots=slots, kinds=kinds, labels=labels)
    chosen, triggers = theme.faults, theme.triggers
    if not theme.is_narrow:
        num_kinds = rng.randint(1, min(rng.choice((3, 100)), len(chosen)))  # few of them act undisturbed
        chosen, triggers = tuple(rng.sample(chosen, num_kinds)), rng.choice((("",), triggers))
    moments = _moments(rng, jobs, max(theme.num_faults, rng.choice((0, 1, 2, 4, 8, 16))))
    faults = [_fault(rng, rng.choice(chosen), at, rng.choice(triggers), theme.seconds) for at in moments]
    moments = _moments(rng, jobs, max(theme.num_actions, rng.choice((0, 0, 1, 3, 6, 12))))
    actions = [_action(rng, rng.choice(theme.actions), at) for at in moments]
    ends = [*(fault.at + fault.seconds for fault in faults), *(each.at for each in (*jobs, *actions))]
    return Plan(
        seed=seed,
        slots=slots,
        num_schedulers=rng.choice((1, 1, 2)),
        policy=rng.choice(("fairshare", "fairshare", "priority")),
        jobs=jobs,
        actions=tuple(actions),
        faults=tuple(faults),
        calm_at=max(ends) + 1.0,
        kinds=kinds,
        labels=labels,
    )


def _moments(rng: random.Random, jobs: Sequence[Submission], count: int) -> list[float]:
    """Draw when things happen: most often while a job trains, and often shortly after one another."""
    moments: list[float] = []
    for _ in range(count):
        how, job = rng.random(), rng.choice(jobs)
        if moments and how < 0.4:
            at = moments[-1] + rng.choice((0.01, 0.3, 3.0)) * rng.random()
        elif how < 0.9:
            at = job.at + rng.uniform(0.0, 1.5 * job.seconds + 1.0)
        else:
            at = rng.uniform(1.0, LONGEST_SECONDS)
        moments.append(min(max(1.0, at), LONGEST_SECONDS))
    return sorted(moments)


def _submission(rng: random.Random, num_slots: int, theme: Theme, *, is_short: bool) -> Submission:
    is_long = theme.has_long_jobs
    num_shards = rng.choice((1, 2, 4) if is_short else (4, 8) if is_long else (1, 2, 4, 8))
    batch_size = 2 * num_shards
    per_epoch = rng.choice((2, 5) if is_short else (12, 40) if is_long else (2, 5, 12, 40))
    script = SimScript(
        num_samples=batch_size * per_epoch - rng.choice((0, 1)),
        batch_size=batch_size,
        num_shards=num_shards,
        epochs=1 if is_short else rng.choice((1, 1, 2, 3)),
        shard_seconds=rng.choice((0.05, 0.2) if is_long else (0.005, 0.05, 0.2)),
        import_seconds=rng.choice((0.1, 1.0) if is_short else (0.1, 1.0, 5.0)),
        checkpoint_every=rng.choice((1, 2, 5) if theme.saves_often else (None, 1, 5, 20)),
    )
    if rng.random() < 0.08:
        script = replace(script, **_defect(rng, script))
    least = min(rng.choice((1, 1, 1, 2)), num_slots)
    return Submission(
        at=rng.uniform(0.0, 20.0),
        script=script,
        min_workers=least,
        max_workers=max(least, rng.choice((2, 2, 4, 6) if is_long else (1, 2, 2, 4, 6))),
        priority=rng.choice((1000, 5000, 5000, 10_000)),
    )


def _with_packages(seed: int, jobs: tuple[Submission, ...], num_hosts: int) -> tuple[Submission, ...]:
    """Let some jobs of some worlds require packages; several of them may require the same."""
    rng = random.Random(f"{seed} packages")
    if rng.random() < 0.7:
        return jobs
    kinds = [
        SimPackages(
            build_seconds=rng.choice((0.1, 1.0, 10.0)),
            is_missing=rng.random() < 0.15,
            failing_host=rng.choice((0, 0, rng.randint(1, num_hosts))),
        )
        for _ in range(rng.choice((1, 2, 3)))
    ]
    return tuple(replace(job, packages=rng.choice((None, *kinds, *kinds))) for job in jobs)


def _labels(seed: int, num_hosts: int) -> tuple[str, ...]:
    """Give the hosts of some worlds labels."""
    rng = random.Random(f"{seed} labels")
    if num_hosts == 1 or rng.random() < 0.6:
        return ()
    return tuple(f"gpu={rng.choice('ab')},zone={rng.choice('xy')}" for _ in range(num_hosts))


def _with_groups(
    seed: int, jobs: tuple[Submission, ...], *, slots: Sequence[int], kinds: Sequence[int], labels: Sequence[str]
) -> tuple[Submission, ...]:
    """Let jobs ask for labels of hosts that are enough for them: one, or all of a host."""
    rng = random.Random(f"{seed} groups")
    offered = sorted({group for each in labels for group in (each, *each.split(","))})

    def fits(job: Submission, group: str) -> bool:
        room = Counter[int]()
        for num, kind, of_host in zip(slots, kinds, labels, strict=True):
            room[kind] += num if set(group.split(",")) <= set(of_host.split(",")) else 0
        return max(room.values()) >= job.min_workers

    fitting = [[group for group in offered if fits(job, group)] for job in jobs]
    return tuple(replace(job, group=rng.choice(("", *some, *some))) for job, some in zip(jobs, fitting, strict=True))


def _defect(rng: random.Random, script: SimScript) -> dict[str, object]:
    kind = rng.choice(("raises_at", "hangs_at", "exits_at", "differs"))
    value = True if kind == "differs" else rng.randrange(-1, script.iterations)
    return {kind: value, "only_on": rng.choice((None, 0, 1))}


def _fault(rng: random.Random, kind: str, at: float, trigger: str, seconds: Sequence[float]) -> Fault:
    return Fault(
        at=rng.uniform(1.0, at) if trigger in RARE else at,
        kind=kind,
        target=rng.randrange(1000),
        seconds=rng.choice(seconds) * rng.uniform(0.5, 1.5),
        number=rng.choice((0, 0, rng.randrange(3), rng.randrange(200))),
        trigger=trigger,
    )


def _action(rng: random.Random, kind: str, at: float) -> Action:
    return Action(
        at=at,
        kind=kind,
        target=rng.randrange(1000),
        value=rng.choice((100, 5000, 20_000)),
    )
