"""The attacks of a campaign and their timing, as a function of the seed. Pure.

Every possible attack occurs once, in random order, then all of them again. Some wait until the pool has recovered from
the previous ones; others overlap with them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from .attacks import AttackKind, TargetKind

MAX_CONCURRENT = 3
_SECONDS = {
    AttackKind.FREEZE: (0.5, 6.0),
    AttackKind.SLOW: (2.0, 6.0),
    AttackKind.PARTITION: (0.5, 8.0),
    AttackKind.SLOW_LINK: (2.0, 6.0),
    AttackKind.DISK_FULL: (2.0, 5.0),
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
