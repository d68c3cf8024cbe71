"""Shares slots by goodput: samples per second times what a sample is worth at that batch size.

A large batch trains more samples a second, but makes less progress with each. With the noise scale φ of the gradient, a
sample in a batch M makes (φ + M0) / (φ + M) of the progress that it makes in the smallest batch M0 (S. McCandlish et
al., "An empirical model of large-batch training", 2018). So each number of workers has its best batch, and its goodput
(A. Qiao et al., "Pollux", OSDI 2021, section 3). The slots are shared so that the sum of the jobs' worth is largest:

    worth = -weight * speed-up ** -0.25

- The speed-up is relative to the goodput with an equal share of the slots. The exponent makes it fair: it costs a job
  more to be twice as slow than it is worth to another to be twice as fast.
- The weight falls with the slot-seconds that the job has attained: as nobody knows how long jobs are, those that have
  had little are the likeliest to be complete soon. It rises with the job's priority.
- Another size than now must earn more than the change costs, until the next decision that changes it. With the same
  size the batch stays while it has nearly the best goodput.

What a job would do with far more workers than it has measured is a guess. So the slots are first shared among sizes
within its reach, and what is left among all sizes.

Slots that would not make any job faster stay idle. A job that has waited for long gets its minimum in its turn.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from math import inf, isfinite
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .changes import lost_share
from .deadlines import with_needed
from .demand import BatchRange, Demand, Target
from .newest import newest
from .ranking import in_turn, is_due
from .shares import admit, within_sizes
from .solver import Curve, Ints, solve
from .throughput import Throughput

Floats = NDArray[np.float64]
Sizes = tuple[int, ...]
Table = tuple[Sizes, Floats, Floats]
"""Sizes, and for each the best batch and the goodput with it."""

EXPONENT = -0.25
WITHOUT_SLOTS = 1e-3
"""The speed-up without any slot."""
NEW_SLOT_SECONDS = 3600.0
"""A job counts as new up to about this many attained slot-seconds."""
NUM_BATCHES = 50
"""How many batch sizes are compared, in equal ratios."""
GROWTH = 2
"""While others can use the slots, a job gets at most this many times the workers that it has measured, or the next
size: what more are worth to it is a guess."""
SAME_GOODPUT = 0.98
"""A batch with this share of the best goodput counts as equally good."""


def goodput(demands: Sequence[Demand], num_slots: int) -> dict[str, Target]:
    """Share the slots so that the sum of what the speed-ups are worth is largest."""
    if not demands:
        return {}
    share = max(1, -(-num_slots // len(demands)))
    demands = with_needed(demands, num_slots)
    ordered = sorted(map(_within_sizes, demands), key=attrgetter("number"))
    keeping = {demand.job for demand in _served_first(ordered, num_slots)}
    wishes = [_wish(demand, min(demand.most, num_slots), share, demand.job in keeping) for demand in ordered]
    given = {
        demand.job: _target(demand, workers, min(demand.most, num_slots), share, num_slots > 0)
        for demand, workers in zip(ordered, _divide(wishes, num_slots), strict=True)
    }
    return {demand.job: given[demand.job] for demand in demands}


def _divide(wishes: Sequence["_Wish"], num_slots: int) -> list[int]:
    """Return the sizes for which the sum of what they are worth is largest, first of those within reach."""
    within = solve([wish.within_reach for wish in wishes], num_slots)
    if sum(within) == num_slots:
        return within
    return solve([_from(wish.curve, size) for wish, size in zip(wishes, within, strict=True)], num_slots)


def _from(curve: Curve, size: int) -> Curve:
    first = int(curve.sizes.searchsorted(size))
    return Curve(curve.sizes[first:], curve.values[first:])


def _served_first(demands: Sequence[Demand], num_slots: int) -> list[Demand]:
    """Return the jobs that get their minimum in any case: those that keep what they have, and those that are due.

    A job that is due waits for those that had slots before, so these get theirs too. Once it has slots it keeps them:
    otherwise the next decision would take them away before it has trained.
    """
    key = in_turn(demands)
    last_due = max((key(demand) for demand in demands if is_due(demand)), default=())
    first = [d for d in demands if not d.is_preemptible or d.was_due or key(d) <= last_due]
    return admit(first, num_slots, key=key)


_within_sizes = newest(within_sizes)


@newest
def _table(demand: Demand, most: int) -> Table:
    return best_batches(demand, allowed_sizes(demand, most))


def allowed_sizes(demand: Demand, num_slots: int) -> Sizes:
    """Return the numbers of workers worth considering: what the job allows, else sizes that fill hosts.

    These are powers of two within a host, and then whole hosts, in steps that grow with their number.
    """
    most = min(demand.most, num_slots)
    if demand.sizes is not None:
        return tuple(size for size in demand.sizes if demand.least <= size <= most)
    if not 0 < demand.least <= most:
        return ()
    found = {demand.least}
    per_host = demand.slots_per_host or most
    size = 1
    while size < per_host:
        found.add(size)
        size *= 2
    hosts = 1
    while hosts * per_host <= most:
        found.add(hosts * per_host)
        hosts = max(hosts + 1, hosts * 9 // 8)
    return tuple(size for size in sorted(found) if demand.least <= size <= most)


def best_batches(demand: Demand, sizes: Sizes) -> Table:
    """Return those of the sizes that can hold a batch, and for each the best batch and the goodput with it.

    The goodput is samples per second, at the worth of a sample of the smallest batch. Without a throughput a job counts
    as one that scales perfectly, and without a noise scale it keeps the smallest batch that its workers can share.
    """
    fixed = max(demand.batch_size, 1)
    batch = demand.batch or BatchRange(fixed, fixed, least_per_slot=0)
    if demand.throughput is None:
        sizes = _holding(batch, sizes)
        return sizes, _batches(batch, sizes)[0], _speeds(demand, sizes)
    return _best_batches(demand.throughput, demand.noise_scale, batch, sizes, demand.slots_per_host or inf)


def _holding(batch: BatchRange, sizes: Sizes) -> Sizes:
    return tuple(size for size in sizes if size * batch.least_per_slot <= batch.most)


@lru_cache(maxsize=16384)
def _best_batches(
    throughput: Throughput, noise: float | None, batch: BatchRange, sizes: Sizes, slots_per_host: float
) -> Table:
    sizes = _holding(batch, sizes)
    batches = _batches(batch, sizes, throughput.micro_batch_size)[: None if noise is not None else 1]
    across = np.array(sizes) > slots_per_host
    rates = throughput.rate(np.array(sizes), batches, across=across)
    if noise is not None and isfinite(noise):
        rates = rates * ((noise + batch.least) / (noise + batches))
    best = rates.argmax(axis=0)
    columns = np.arange(len(sizes))
    return sizes, batches[best, columns], rates[best, columns]


def _speeds(demand: Demand, sizes: Sizes) -> Floats:
    """Return how fast a job is that scales perfectly: as fast as the worker with most shards."""
    workers = np.array(sizes, dtype=float)
    return workers if demand.num_shards is None else demand.num_shards / np.ceil(demand.num_shards / workers)


@lru_cache(maxsize=4096)
def _batches(batch: BatchRange, sizes: Sizes, micro_batch_size: int | None = None) -> Floats:
    """Return batch sizes, from the smallest that the workers can share on: a column for each number of workers.

    With a ``micro_batch_size``, those that fill all passes are among them.
    """
    workers = np.array(sizes, dtype=float)
    least = np.maximum(batch.least, batch.least_per_slot * workers)
    ratios = (batch.most / least) ** np.linspace(0.0, 1.0, NUM_BATCHES)[:, None]
    found = np.minimum(np.rint(least * ratios), batch.most)
    if micro_batch_size is None:
        return np.asarray(found)
    full = micro_batch_size * workers
    return np.concatenate([found, np.maximum(found // full * full, least)])


class _Wish(NamedTuple):
    """What sizes are worth to a job."""

    curve: Curve
    within_reach: Curve
    """The curve up to `GROWTH` times the workers that the job has measured, and to what it has."""


@newest
def _wish(demand: Demand, most: int, share: int, keeps: bool) -> _Wish:
    curve = _curve(demand, most, share, keeps)
    reach = max(GROWTH * demand.most_measured, demand.assigned_workers, 1)
    end = int(curve.sizes.searchsorted(reach)) + 1
    return _Wish(curve, Curve(curve.sizes[:end], curve.values[:end]))


def _curve(demand: Demand, most: int, share: int, keeps: bool) -> Curve:
    """Return what sizes are worth; no slots at all is one of them, unless the job ``keeps`` its minimum."""
    sizes, _, goodputs = _table(demand, most)
    if not sizes:
        return Curve(np.array([0]), np.array([0.0]))
    speed_ups, equal = np.zeros(len(sizes) + 1), _equal_share(sizes, goodputs, share)
    speed_ups[1:] = goodputs * ((1.0 - lost_share(demand)) / equal)
    if demand.assigned_workers in sizes:
        present = sizes.index(demand.assigned_workers)
        speed_ups[present + 1] = goodputs[present] / equal
    weight = demand.priority / np.sqrt(demand.attained + NEW_SLOT_SECONDS)
    worth = -weight * (speed_ups + WITHOUT_SLOTS) ** EXPONENT
    with_none = _with_none(sizes)
    return Curve(with_none[1:], worth[1:]) if keeps else Curve(with_none, worth)


@lru_cache(maxsize=4096)
def _with_none(sizes: Sizes) -> Ints:
    """Return the sizes, preceded by 0: no slots."""
    return np.array((0, *sizes))


def _equal_share(sizes: Sizes, goodputs: Floats, share: int) -> float:
    """Return the goodput of the largest size within an equal share, or of the smallest one."""
    return float(goodputs[max(bisect_right(sizes, share) - 1, 0)])


@newest
def _target(demand: Demand, workers: int, most: int, share: int, has_slots: bool) -> Target:
    sizes, batches, goodputs = _table(demand, most)
    if not workers:
        return Target(0, _waiting(demand, sizes, most) if has_slots else "waiting for a host: the pool has no slots")
    index = sizes.index(workers)
    speed_up = goodputs[index] / _equal_share(sizes, goodputs, share)
    reason = f"goodput: {speed_up:.2g} times that of an equal share"
    if not demand.batch:
        return Target(workers, reason)
    best, highest = int(batches[index]), float(goodputs[index])
    if demand.is_scattered and workers == demand.assigned_workers:
        best, highest = _best_across(demand, workers, otherwise=(best, highest))
    is_kept = workers == demand.assigned_workers and _present(demand) >= SAME_GOODPUT * highest
    return Target(workers, reason, batch_size=demand.batch_size if is_kept else best)


def _best_across(demand: Demand, workers: int, *, otherwise: tuple[int, float]) -> tuple[int, float]:
    """Return the best batch and the goodput with it for workers that are on several hosts though one could hold them.

    Their exchange takes longer than that of the packed workers for which sizes are compared.
    """
    if demand.throughput is None or demand.batch is None:
        return otherwise
    _, batches, goodputs = _best_batches(demand.throughput, demand.noise_scale, demand.batch, (workers,), 0)
    return int(batches[0]), float(goodputs[0])


def _present(demand: Demand) -> float:
    """Return the goodput with the workers and the batch that the job has; 0 if that is not known, or not allowed."""
    size, workers, noise, limits = demand.batch_size, demand.assigned_workers, demand.noise_scale, demand.batch
    if limits is None or demand.throughput is None or noise is None:
        return 0.0
    if not max(limits.least, workers * limits.least_per_slot) <= size <= limits.most:
        return 0.0
    across = demand.is_across(workers)
    worth = (noise + limits.least) / (noise + size) if isfinite(noise) else 1.0
    return worth * size / demand.throughput.seconds_of(workers, size, across=across)


def _waiting(demand: Demand, sizes: Sizes, most: int) -> str:
    if not sizes:
        return f"waiting for hosts: no allowed number of workers from {demand.least} to {most}"
    return f"waiting for {sizes[0]} slots: other jobs make more progress with them"
