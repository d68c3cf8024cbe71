"""What happens in a world, drawn from its seed before it begins: its shape, its jobs, what users do, and the faults.

A plan is data, so that a failing one can be cut shorter.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from .training import SimScript

CALM_AT = 60.0
"""Seconds of virtual time at which the faults cease."""

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
    "cut host",
    "cut pair",
    "cut pair one way",
    "cut data links",
    "cut control links",
    "reset links",
    "slow links",
    "cut storage",
    "storage fails",
    "slow storage",
    "ambiguous storage",
    "stale storage",
    "full storage",
    "damaged storage",
    "step clock",
)
ACTIONS = ("pause", "resume", "stop", "priority", "drain", "submit again")


@dataclass(frozen=True)
class Submission:
    """A job that a user submits."""

    at: float
    script: SimScript
    min_workers: int
    max_workers: int
    priority: int


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

    def __str__(self) -> str:
        return f"{self.at:7.3f} {self.kind} target={self.target} seconds={self.seconds:.1f} number={self.number}"


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


def draw(seed: int) -> Plan:
    """Draw the plan of ``seed``. Some plans are mild: what goes wrong without faults must be found as well."""
    rng = random.Random(f"{seed} plan")
    num_jobs = rng.choice((1, 1, 2, 2, 3, 5))
    num_faults = rng.choice((0, 1, 2, 4, 8, 16))
    kinds = rng.sample(FAULTS, rng.randint(1, len(FAULTS)))  # few kinds at a time let each act undisturbed
    faults = sorted((_fault(rng, rng.choice(kinds)) for _ in range(num_faults)), key=lambda fault: fault.at)
    num_actions = rng.choice((0, 0, 1, 3, 6))
    actions = sorted((_action(rng) for _ in range(num_actions)), key=lambda action: action.at)
    slots = tuple(rng.choice((1, 2, 2, 3, 4)) for _ in range(rng.choice((1, 2, 2, 3))))
    return Plan(
        seed=seed,
        slots=slots,
        num_schedulers=rng.choice((1, 1, 2)),
        policy=rng.choice(("fairshare", "fairshare", "priority")),
        jobs=tuple(_submission(rng, sum(slots)) for _ in range(num_jobs)),
        actions=tuple(actions),
        faults=tuple(faults),
    )


def _submission(rng: random.Random, num_slots: int) -> Submission:
    num_shards = rng.choice((1, 2, 4, 8))
    batch_size = 2 * num_shards
    script = SimScript(
        num_samples=batch_size * rng.choice((2, 5, 12, 40)) - rng.choice((0, 1)),
        batch_size=batch_size,
        num_shards=num_shards,
        epochs=rng.choice((1, 1, 2, 3)),
        shard_seconds=rng.choice((0.005, 0.05, 0.2)),
        import_seconds=rng.choice((0.1, 1.0, 5.0)),
        checkpoint_every=rng.choice((None, 1, 5, 20)),
    )
    if rng.random() < 0.08:
        script = replace(script, **_defect(rng, script))
    least = min(rng.choice((1, 1, 1, 2)), num_slots)
    return Submission(
        at=rng.uniform(0.0, 20.0),
        script=script,
        min_workers=least,
        max_workers=max(least, rng.choice((1, 2, 2, 4, 6))),
        priority=rng.choice((1000, 5000, 5000, 10_000)),
    )


def _defect(rng: random.Random, script: SimScript) -> dict[str, object]:
    kind = rng.choice(("raises_at", "hangs_at", "exits_at", "differs"))
    value = True if kind == "differs" else rng.randrange(script.iterations)
    return {kind: value, "only_on": rng.choice((None, 0, 1))}


def _fault(rng: random.Random, kind: str) -> Fault:
    return Fault(
        at=rng.uniform(1.0, CALM_AT - 10),
        kind=kind,
        target=rng.randrange(1000),
        seconds=rng.choice((0.05, 0.5, 2.0, 5.0, 15.0)) * rng.uniform(0.5, 1.5),
        number=rng.choice((0, 0, rng.randrange(3), rng.randrange(200))),
    )


def _action(rng: random.Random) -> Action:
    return Action(
        at=rng.uniform(1.0, CALM_AT - 10),
        kind=rng.choice(ACTIONS),
        target=rng.randrange(1000),
        value=rng.choice((100, 5000, 20_000)),
    )
