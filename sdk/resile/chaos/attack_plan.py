"""The attacks of a campaign, their timing and their targets, as a function of the seed and of what is running. Pure.

Every possible attack occurs once, in random order, then all of them again. Some wait until the pool has recovered from
the previous ones; others overlap with them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from resile_shared.errors import ResileError
from resile_shared.messages.jobs import DEFAULT_PRIORITY

from .attacks import Attack, AttackKind, Target, TargetKind
from .processes import PoolProcesses

MAX_CONCURRENT = 3
_SECONDS = {
    AttackKind.FREEZE: (0.5, 6.0),
    AttackKind.SLOW: (2.0, 6.0),
    AttackKind.PARTITION: (0.5, 8.0),
    AttackKind.SLOW_LINK: (2.0, 6.0),
    AttackKind.DISK_FULL: (2.0, 5.0),
    AttackKind.UNMOUNT: (0.5, 6.0),
    AttackKind.LIMIT_FILES: (2.0, 8.0),
    AttackKind.CUT_PEER: (0.5, 8.0),
    AttackKind.CUT_ONE_WAY: (0.5, 8.0),
    AttackKind.CUT_BUS: (0.5, 8.0),
    AttackKind.DUPLICATE: (1.0, 6.0),
    AttackKind.PAUSE: (0.0, 4.0),
    AttackKind.DRAIN: (0.0, 2.0),
}


@dataclass(frozen=True)
class PlannedAttack:
    """One attack of the plan. ``pick``, from 0 to 1, selects one of the possible targets."""

    number: int
    kind: AttackKind
    what: TargetKind
    seconds: float
    pick: float
    pause_seconds: float
    """Seconds to wait before the attack."""
    waits: bool
    """Whether to wait first until the pool has recovered from all previous attacks."""


def planned_attacks(seed: int, possible: Sequence[tuple[AttackKind, TargetKind]]) -> Iterator[PlannedAttack]:
    """Yield attacks; never ends."""
    rng = Random(seed)
    number, at_once = 0, 0
    while True:
        for kind, what in rng.sample(possible, len(possible)):
            number += 1
            waits = at_once >= MAX_CONCURRENT or rng.random() < 0.5
            at_once = 1 if waits else at_once + 1
            yield PlannedAttack(
                number,
                kind,
                what,
                seconds=round(rng.uniform(*_SECONDS[kind]), 1) if kind.lasts else 0.0,
                pick=rng.random(),
                pause_seconds=round(rng.uniform(0.0, 1.5), 2),
                waits=waits,
            )


def choose_attack(planned: PlannedAttack, jobs: Sequence[str], processes: PoolProcesses) -> Attack:
    """Return the attack; its target belongs to ``jobs``. Raises ResileError if nothing of that kind is running."""
    names = _names(planned, jobs, processes)
    if not names:
        raise ResileError(f"no {planned.what} is running")
    name = _pick(planned, names)
    return Attack(
        planned.kind,
        Target(planned.what, name),
        seconds=planned.seconds,
        other=_other(planned, name, processes),
        priority=1 + int(planned.pick * 2 * DEFAULT_PRIORITY) if planned.kind is AttackKind.PRIORITY else 0,
    )


def _names(planned: PlannedAttack, jobs: Sequence[str], processes: PoolProcesses) -> Sequence[str]:
    own = [worker for worker in processes.workers() if worker.job in jobs]
    match planned.what:
        case TargetKind.WORKER:
            return [f"{worker.job}/{worker.number}" for worker in own]
        case TargetKind.HOST if planned.kind is AttackKind.KILL_LATE:
            return sorted({worker.host for worker in own})
        case TargetKind.AGENT | TargetKind.HOST:
            return sorted(processes.hosts())
        case TargetKind.JOB | TargetKind.OBJECT_STORE:
            return jobs
        case _:
            return [""]


def _other(planned: PlannedAttack, name: str, processes: PoolProcesses) -> str:
    """Return the part of the network from which a host is cut off. Raises ResileError if there is none."""
    if planned.kind is AttackKind.CUT_BUS:
        return "bus"
    if planned.kind not in (AttackKind.CUT_PEER, AttackKind.CUT_ONE_WAY):
        return ""
    others = [host for host in sorted(processes.hosts()) if host != name]
    if not others:
        raise ResileError("the attack needs a second host, and there is none")
    return _pick(planned, others)


def _pick(planned: PlannedAttack, names: Sequence[str]) -> str:
    return names[int(planned.pick * len(names))]
