"""Strikes at a training that should go on: a signal to some of its processes, and the time until the others commit.

The time runs from the signal to the first iteration that is committed by a membership without those who were hit. A
committed iteration is lost if its number is committed once more.
"""

import asyncio
import os
import random
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from stamps import Stamp, Stamps

STEADY = 20
"""Iterations that one membership has trained before it is hit."""
SPREAD = 10
"""Iterations in which the moment of a strike lies; as many as others train between two checkpoints."""
POLL_SECONDS = 0.01
PATIENCE_SECONDS = 120.0
SEED = 1


class NotRecovered(Exception):
    """A training did not go on."""


class Struck(Protocol):
    """A training that can be hit."""

    stamps: Stamps
    size: int
    """Of its whole membership."""

    def victims(self, chance: random.Random) -> Sequence[int]:
        """Return the processes that are hit together this time."""

    async def mend(self) -> None:
        """See to it that the training becomes whole again, where it does not do so by itself."""


@dataclass(frozen=True)
class Recovery:
    """What one strike did. Times in seconds."""

    struck: float
    """When, on the clock of stamps."""
    membership: str
    """That which committed the first iteration after it."""
    seconds: float
    lost: int
    """Committed iterations that were computed again."""
    usual: float
    """An iteration before it."""


async def strike(training: Struck, *, times: int, sent: signal.Signals = signal.SIGKILL) -> list[Recovery]:
    """Hit ``training`` so many times, each time when it is whole again. Raises NotRecovered."""
    chance = random.Random(SEED)
    recoveries = []
    for number in range(times):
        usual = await _until_whole(training, f"before strike {number + 1}")
        await asyncio.sleep(chance.uniform(0, SPREAD) * usual)
        victims = training.victims(chance)
        struck = time.monotonic()
        for pid in victims:
            os.kill(pid, sent)
        recoveries.append(await _recovery(training.stamps, struck, usual, f"after strike {number + 1}"))
        await training.mend()
    return recoveries


async def _until_whole(training: Struck, when: str) -> float:
    """Wait until all members train steadily; return what an iteration takes."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        last = _by_iteration(training.stamps.read()[-STEADY * training.size :])[-STEADY:]
        is_one = len(last) == STEADY and len({stamp.membership for stamp in last}) == 1
        if is_one and last[-1].workers == training.size and time.monotonic() - last[-1].time < 1.0:
            return statistics.median(b.time - a.time for a, b in pairwise(last))
        await asyncio.sleep(POLL_SECONDS)
    raise NotRecovered(f"{when}: no {training.size} members trained within {PATIENCE_SECONDS:g} s")


def _by_iteration(stamps: Sequence[Stamp]) -> list[Stamp]:
    """Keep of each iteration the first stamp: every member of a training may note it."""
    seen: dict[int, Stamp] = {}
    for stamp in stamps:
        seen.setdefault(stamp.iteration, stamp)
    return list(seen.values())


async def _recovery(stamps: Stamps, struck: float, usual: float, when: str) -> Recovery:
    deadline = struck + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        seen = stamps.read()
        membership = next(stamp.membership for stamp in reversed(seen) if stamp.time <= struck)
        after = next((stamp for stamp in seen if stamp.time > struck and stamp.membership != membership), None)
        if after is not None:
            committed = max(stamp.iteration for stamp in seen if stamp.membership == membership)
            lost = max(0, committed + 1 - after.iteration)
            return Recovery(struck, after.membership, after.time - struck, lost, usual)
        await asyncio.sleep(POLL_SECONDS)
    raise NotRecovered(f"{when}: nothing was committed within {PATIENCE_SECONDS:g} s")
