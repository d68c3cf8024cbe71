"""Which members are persistently slower than the others, and why. Pure: measurements come in, warnings go out.

Every header carries what its sender measured (`Pace`). Iterations are summed up in blocks, and the last few blocks are
the window. A member is a straggler when in the median block its time per shard is far above the median of the others.
The reason follows from what its excess time consists of:

- *data*: it waits for its data, while it computes as fast as the others;
- *other processes*: the excess is not its own processor time: other processes use the processor, or it is throttled;
- *device*: it uses its processor all the time, and needs longer;
- *link*: it is not late itself, but the others wait for its header during a large part of each iteration.

A straggler stays one until it is clearly faster again (hysteresis).
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
"""Below this factor a straggler is no longer one."""
LARGE_PART = 0.5
SAME_PACE = 1.2
NOTABLE = 0.1
"""An excess below this part of an iteration does not matter."""
MAX_WARNINGS = 20
"""The most warnings that a worker issues in its life: a straggler that comes and goes is not worth more."""

_EXPLANATIONS: dict[Reason, str] = {
    "data": "it waits for its data",
    "other processes": "other processes use its processor, or it is throttled",
    "device": "its device is slower",
    "link": "the others wait for its link",
}


class Pace(NamedTuple):
    """What one member measured in one iteration. Seconds."""

    shards: int = 0
    data: float = 0.0
    compute: float = 0.0
    processor: float = 0.0
    """Processor time of the member's process during data and compute."""
    callback: float = 0.0
    """Time in the user's code between the last exchange and this iteration's data."""
    last: int = -1
    """The rank whose header came last in the previous exchange."""
    awaited: float = 0.0
    """How long the last header of the previous exchange was the only one missing."""


@dataclass(frozen=True)
class Straggler:
    """A member that is slower than the others by ``factor``."""

    factor: float
    reason: Reason


@dataclass(frozen=True)
class _Block:
    """Sums over some iterations, for each member."""

    seconds: float
    paces: Sequence[Pace]
    waits: Sequence[Sequence[float]]
    """waits[r][s]: how long rank r waited for rank s alone."""

    def per_shard(self, of: Callable[[Pace], float]) -> list[float]:
        """Return ``of`` each member, divided by its number of shards."""
        return [of(pace) / max(pace.shards, 1) for pace in self.paces]


class Stragglers:
    """Compares the members of one generation at a time; `restart` begins the next."""

    def __init__(self) -> None:
        self._workers: tuple[int, ...] = ()
        self._rows: list[Sequence[Pace]] = []
        self._block_started = 0.0
        self._blocks: deque[_Block] = deque(maxlen=WINDOW_BLOCKS)
        self._num_warnings = 0
        self.found: dict[int, Straggler] = {}
        """The current stragglers, by worker id."""

    def restart(self, workers: tuple[int, ...], *, now: float) -> None:
        """Compare these members from now on, in rank order, and forget what was measured before."""
        self._workers = workers
        self._rows, self._block_started = [], now
        self._blocks.clear()
        self.found = {worker: found for worker, found in self.found.items() if worker in workers}

    def on_iteration(self, paces: Sequence[Pace | None], *, now: float) -> list[str]:
        """Add one iteration as all ranks measured it; return the warnings to issue, most often none."""
        self._rows.append([pace or Pace() for pace in paces])
        if len(self._rows) < BLOCK_ITERATIONS or now - self._block_started < BLOCK_SECONDS:
            return []
        self._blocks.append(_block(self._rows, now - self._block_started))
        self._rows, self._block_started = [], now
        if len(self._blocks) < WINDOW_BLOCKS or len(self._workers) < 2:
            return []
        warnings = self._compare()[: MAX_WARNINGS - self._num_warnings]
        self._num_warnings += len(warnings)
        return warnings

    def _compare(self) -> list[str]:
        warnings = []
        for rank, worker in enumerate(self._workers):
            before = self.found.get(worker)
            now = self._judge(rank, FAST if before else SLOW)
            if now is None and before is not None:
                del self.found[worker]
                what = f"the link of worker {worker}" if before.reason == "link" else f"worker {worker}"
                warnings.append(f"{what} is about as fast as the others again")
            elif now is not None and (before is None or before.reason != now.reason):
                self.found[worker] = now
                warnings.append(self._warning(worker, now))
        return warnings

    def _judge(self, rank: int, limit: float) -> Straggler | None:
        """Return whether the median block shows ``rank`` to be a straggler."""
        factor = statistics.median(_own_factor(block, rank) for block in self._blocks)
        if factor > limit:
            reasons = [_reason(block, rank) for block in self._blocks]
            return Straggler(factor, max(reasons, key=reasons.count))
        if len(self._workers) == 2 and rank == 0:
            return None  # with two members it is the same link as that of rank 1
        factor = statistics.median(_link_factor(block, rank) for block in self._blocks)
        return Straggler(factor, "link") if factor > limit else None

    def _warning(self, worker: int, found: Straggler) -> str:
        if found.reason == "link" and len(self._workers) == 2:
            pair = " and ".join(map(str, sorted(self._workers)))
            return f"iterations take {found.factor:.1f} times as long because of the link between workers {pair}"
        if found.reason == "link":
            return (
                f"iterations take {found.factor:.1f} times as long because of worker {worker}: {_EXPLANATIONS['link']}"
            )
        times = f"{found.factor:.1f} times as long as the others"
        return f"worker {worker} takes {times} for a shard: {_EXPLANATIONS[found.reason]}"


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


def _excess(values: Sequence[float], rank: int) -> tuple[float, float]:
    """How far a rank is above the median of the others, and that median."""
    typical = statistics.median([*values[:rank], *values[rank + 1 :]])
    return values[rank] - typical, typical


def _own_factor(block: _Block, rank: int) -> float:
    excess, typical = _excess(block.per_shard(_own), rank)
    is_notable = excess * block.paces[rank].shards > NOTABLE * block.seconds
    return 1 + excess / typical if is_notable and typical > 0 else 1.0


def _reason(block: _Block, rank: int) -> Reason:
    excess, _ = _excess(block.per_shard(_own), rank)
    of_data, _ = _excess(block.per_shard(lambda pace: pace.data), rank)
    of_compute, typical_compute = _excess(block.per_shard(lambda pace: pace.compute), rank)
    of_processor, _ = _excess(block.per_shard(lambda pace: pace.processor), rank)
    computes_as_others = of_compute <= (SAME_PACE - 1) * typical_compute
    if of_data >= LARGE_PART * excess and computes_as_others:
        return "data"
    if of_processor < LARGE_PART * excess:
        return "other processes"
    return "data" if of_data >= LARGE_PART * excess else "device"


def _link_factor(block: _Block, rank: int) -> float:
    """How much longer iterations take because all others wait for what ``rank`` has already sent."""
    awaited = statistics.median_low(row[rank] for other, row in enumerate(block.waits) if other != rank)
    busy = [_own(pace) + pace.callback for pace in block.paces]
    own_delay, _ = _excess(busy, rank)
    awaited -= max(0.0, own_delay)
    return block.seconds / (block.seconds - awaited) if 0 < awaited < block.seconds else 1.0
