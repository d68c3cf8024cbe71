"""Which members are persistently slower than the others, and why. Pure: what members measured comes in, words go out.

Every header says what its sender measured (`Pace`). Iterations are summed up in blocks, and the last few blocks make
the window. A member is a straggler when in the median block its time per shard is far above the median of the others,
and why is told by what its surplus consists of:

- *data*: it waits for its data, while it computes as fast as the others;
- *other processes*: the surplus is not of its own processor time: somebody else has the processor, or it is throttled;
- *device*: it uses its processor all the time, and needs longer;
- *link*: it is not late itself, but the others wait for its words a large part of each iteration.

Who is found once is said to be one until it is clearly one no more.
"""

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Reason = Literal["data", "other processes", "device", "link"]

WINDOW_BLOCKS = 5
BLOCK_ITERATIONS = 10
BLOCK_SECONDS = 1.0
SLOW = 1.5
FAST = 1.25
"""Below it a straggler is one no more."""
LARGE_PART = 0.5
SAME_PACE = 1.2
NOTABLE = 0.1
"""A surplus that is a smaller part of an iteration harms nobody."""
MAX_WORDS = 20
"""So many a worker says in its life: what comes and goes all the time is not worth more."""

_WORDS: dict[Reason, str] = {
    "data": "it waits for its data",
    "other processes": "other processes take its processor, or it is throttled",
    "device": "its device is slower",
    "link": "the others wait for its link",
}


class Pace(NamedTuple):
    """What one member measured in one iteration. Seconds."""

    shards: int = 0
    data: float = 0.0
    compute: float = 0.0
    processor: float = 0.0
    """Processor time of its process during data and compute."""
    callback: float = 0.0
    """What the user's code took between the last exchange and this iteration's data."""
    last: int = -1
    """In the exchange before: the rank whose words came last."""
    awaited: float = 0.0
    """And for how long it was the only one that was waited for."""


@dataclass(frozen=True)
class Straggler:
    """A member that is slower than the others by ``factor``."""

    factor: float
    reason: Reason


@dataclass(frozen=True)
class _Block:
    """Sums over some iterations: of one member each."""

    seconds: float
    paces: Sequence[Pace]
    waits: Sequence[Sequence[float]]
    """waits[r][s]: for how long rank r waited for rank s alone."""

    def per_shard(self, of: Callable[[Pace], float]) -> list[float]:
        """Return what ``of`` says of each member, for one shard."""
        return [of(pace) / max(pace.shards, 1) for pace in self.paces]


class Stragglers:
    """Compares the members of one generation; a new one is begun by `members_are`."""

    def __init__(self) -> None:
        self._workers: tuple[int, ...] = ()
        self._rows: list[Sequence[Pace]] = []
        self._began = 0.0
        self._blocks: deque[_Block] = deque(maxlen=WINDOW_BLOCKS)
        self._num_words = 0
        self.found: dict[int, Straggler] = {}
        """Those that are known to be slower, by worker id."""

    def members_are(self, workers: tuple[int, ...], *, now: float) -> None:
        """From now on these are compared, in rank order; what was measured before counts no more."""
        self._workers = workers
        self._rows, self._began = [], now
        self._blocks.clear()
        self.found = {worker: found for worker, found in self.found.items() if worker in workers}

    def measured(self, paces: Sequence[Pace | None], *, now: float) -> list[str]:
        """Take in one iteration as all ranks measured it; return what there is to say of it, most often nothing."""
        self._rows.append([pace or Pace() for pace in paces])
        if len(self._rows) < BLOCK_ITERATIONS or now - self._began < BLOCK_SECONDS:
            return []
        self._blocks.append(_block(self._rows, now - self._began))
        self._rows, self._began = [], now
        if len(self._blocks) < WINDOW_BLOCKS or len(self._workers) < 2:
            return []
        words = self._compare()[: MAX_WORDS - self._num_words]
        self._num_words += len(words)
        return words

    def _compare(self) -> list[str]:
        words = []
        for rank, worker in enumerate(self._workers):
            before = self.found.get(worker)
            now = self._judge(rank, FAST if before else SLOW)
            if now is None and before is not None:
                del self.found[worker]
                what = f"the link of worker {worker}" if before.reason == "link" else f"worker {worker}"
                words.append(f"{what} is about as fast as the others again")
            elif now is not None and (before is None or before.reason != now.reason):
                self.found[worker] = now
                words.append(self._words(worker, now))
        return words

    def _judge(self, rank: int, limit: float) -> Straggler | None:
        """Say what the median block says of ``rank``."""
        factor = statistics.median(_own_factor(block, rank) for block in self._blocks)
        if factor > limit:
            reasons = [_reason(block, rank) for block in self._blocks]
            return Straggler(factor, max(reasons, key=reasons.count))
        if len(self._workers) == 2 and rank == 0:
            return None  # it would be the same link
        factor = statistics.median(_link_factor(block, rank) for block in self._blocks)
        return Straggler(factor, "link") if factor > limit else None

    def _words(self, worker: int, found: Straggler) -> str:
        if found.reason == "link" and len(self._workers) == 2:
            pair = " and ".join(map(str, sorted(self._workers)))
            return f"iterations take {found.factor:.1f} times as long by the link between workers {pair}"
        if found.reason == "link":
            return f"iterations take {found.factor:.1f} times as long by worker {worker}: {_WORDS['link']}"
        times = f"{found.factor:.1f} times as long as the others"
        return f"worker {worker} takes {times} for a shard: {_WORDS[found.reason]}"


def _block(rows: Sequence[Sequence[Pace]], seconds: float) -> _Block:
    num_ranks = len(rows[0])
    waits = [[0.0] * num_ranks for _ in range(num_ranks)]
    for row in rows:
        for rank, pace in enumerate(row):
            if 0 <= pace.last < num_ranks:
                waits[rank][pace.last] += pace.awaited
    sums = [Pace(*map(sum, zip(*(row[rank] for row in rows), strict=True))) for rank in range(num_ranks)]
    return _Block(seconds, sums, waits)


def _own(pace: Pace) -> float:
    return pace.data + pace.compute


def _surplus(values: Sequence[float], rank: int) -> tuple[float, float]:
    """How far a rank is above the median of the others, and that median."""
    usual = statistics.median([*values[:rank], *values[rank + 1 :]])
    return values[rank] - usual, usual


def _own_factor(block: _Block, rank: int) -> float:
    surplus, usual = _surplus(block.per_shard(_own), rank)
    is_notable = surplus * block.paces[rank].shards > NOTABLE * block.seconds
    return 1 + surplus / usual if is_notable and usual > 0 else 1.0


def _reason(block: _Block, rank: int) -> Reason:
    surplus, _ = _surplus(block.per_shard(_own), rank)
    of_data, _ = _surplus(block.per_shard(lambda pace: pace.data), rank)
    of_compute, usual_compute = _surplus(block.per_shard(lambda pace: pace.compute), rank)
    of_processor, _ = _surplus(block.per_shard(lambda pace: pace.processor), rank)
    computes_as_others = of_compute <= (SAME_PACE - 1) * usual_compute
    if of_data >= LARGE_PART * surplus and computes_as_others:
        return "data"
    if of_processor < LARGE_PART * surplus:
        return "other processes"
    return "data" if of_data >= LARGE_PART * surplus else "device"


def _link_factor(block: _Block, rank: int) -> float:
    """How much longer iterations take because all others wait for what ``rank`` has sent already."""
    awaited = statistics.median_low(row[rank] for other, row in enumerate(block.waits) if other != rank)
    busy = [_own(pace) + pace.callback for pace in block.paces]
    own_delay, _ = _surplus(busy, rank)
    awaited -= max(0.0, own_delay)
    return block.seconds / (block.seconds - awaited) if 0 < awaited < block.seconds else 1.0
