"""Which attacks a campaign makes, and in which rhythm: a function of the seed. Pure.

Attacks are dealt like cards: each that the pool allows once, in random order, then all of them again. Some wait until
the pool has recovered from those before; others fall into it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from .attacks import Kind, What

MOST_AT_ONCE = 3
_SECONDS = {
    Kind.FREEZE: (0.5, 6.0),
    Kind.SLOW: (2.0, 6.0),
    Kind.PARTITION: (0.5, 8.0),
    Kind.SLOW_LINK: (2.0, 6.0),
    Kind.DISK_FULL: (2.0, 5.0),
}


@dataclass(frozen=True)
class Card:
    """One attack of the plan. ``pick``, from 0 to 1, says which of those whom it can hit."""

    number: int
    kind: Kind
    what: What
    seconds: float
    pick: float
    pause_seconds: float
    """Before it."""
    waits: bool
    """Until the pool has recovered from all before."""


def deal(seed: int, menu: Sequence[tuple[Kind, What]]) -> Iterator[Card]:
    """Return attacks without end."""
    chance = Random(seed)
    number, at_once = 0, 0
    while True:
        for kind, what in chance.sample(menu, len(menu)):
            number += 1
            waits = at_once >= MOST_AT_ONCE or chance.random() < 0.5
            at_once = 1 if waits else at_once + 1
            yield Card(
                number,
                kind,
                what,
                seconds=round(chance.uniform(*_SECONDS[kind]), 1) if kind.lasts else 0.0,
                pick=chance.random(),
                pause_seconds=round(chance.uniform(0.0, 1.5), 2),
                waits=waits,
            )
