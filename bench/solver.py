"""How long it takes to decide who gets how many slots, beside the plain dynamic program on the same input.

    python bench/solver.py [--quick | --tiny] [--json]

Each kind of curve says how a job's worth rises with its slots. The plain program goes over jobs, slots and sizes, as in
arXiv:2006.13878, with numpy over the slots. Times are medians of processor time: all of it is one thread. An event is
one job that changes: the sharing is solved again. The policy's decision also finds the best batch of each job for each
number of slots; after an event that is done for the job that changed.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from report import Target, argument_parser, conclude, print_table

from resile_scheduler.policies.demand import BatchRange, Demand
from resile_scheduler.policies.elastic_batch import elastic_batch
from resile_scheduler.policies.solver import Curve, solve
from resile_scheduler.policies.throughput import Line, Throughput

MOST = 64
"""The slots that one job can use."""
TURNS = 7
Kind = Callable[[np.random.Generator], Curve]


def amdahl(rng: np.random.Generator) -> Curve:
    """Concave: part of the work is serial."""
    sizes = np.arange(1, MOST + 1)
    serial = rng.uniform(0.0, 0.3)
    return Curve(sizes, sizes / (1.0 - serial + serial * sizes))


def hosts(rng: np.random.Generator) -> Curve:
    """Slower on more than one host of 8: worth falls at the 9th slot."""
    sizes = np.arange(1, MOST + 1)
    across = rng.uniform(0.0, 0.1) * (sizes > 8)
    seconds = 1.0 / sizes + rng.uniform(0.0, 0.05) * (sizes > 1) + across + rng.uniform(0.0, 0.002) * sizes
    return Curve(sizes, seconds[0] / seconds)


def shards(rng: np.random.Generator) -> Curve:
    """Steps: the slowest worker computes whole shards."""
    num_shards = int(rng.choice([8, 16, 24, 32, 48, MOST]))
    sizes = np.arange(1, num_shards + 1)
    return Curve(sizes, num_shards / np.ceil(num_shards / sizes) * rng.choice([0.5, 1.0, 2.0]))


def gangs(rng: np.random.Generator) -> Curve:
    """All or nothing."""
    size = int(rng.integers(2, MOST))
    return Curve(np.array([0, size]), np.array([0.0, size + rng.uniform(-0.1, 0.1)]))


def convex(rng: np.random.Generator) -> Curve:
    """Each slot is worth more than the one before."""
    sizes = np.arange(0, MOST + 1)
    return Curve(sizes, (sizes / MOST) ** 2 * rng.uniform(0.9, 1.1))


def mixed(rng: np.random.Generator) -> Curve:
    """Any of the others."""
    kinds = (amdahl, hosts, shards, gangs, convex)
    return kinds[int(rng.integers(len(kinds)))](rng)


KINDS: tuple[Kind, ...] = (amdahl, hosts, shards, gangs, convex, mixed)


def plain(curves: Sequence[Curve], num_slots: int) -> float:
    """Return the largest sum by the plain program."""
    best = np.zeros(num_slots + 1)
    for curve in curves:
        after = np.full(num_slots + 1, -np.inf)
        for size, value in zip(curve.sizes.tolist(), curve.values.tolist(), strict=True):
            if size <= num_slots:
                np.maximum(after[size:], best[: num_slots + 1 - size] + value, out=after[size:])
        best = after
    return float(best[num_slots])


def worth(curves: Sequence[Curve], sizes: Sequence[int]) -> float:
    """Return the sum of the values of ``sizes``."""
    return sum(float(c.values[np.searchsorted(c.sizes, n)]) for c, n in zip(curves, sizes, strict=True))


def seconds(run: Callable[[], object], turns: int = TURNS) -> float:
    """Return the median processor time."""
    times = []
    for _ in range(turns):
        begun = time.process_time()
        run()
        times.append(time.process_time() - begun)
    return statistics.median(times)


@dataclass(frozen=True)
class Measured:
    """What one kind of curve has shown. Times are milliseconds; None: not run, for it would not end soon."""

    jobs: int
    slots: int
    curves: str
    solve_ms: float
    event_ms: float
    plain_ms: float | None = None
    difference: float | None = None
    """From the plain program's optimum, relative."""


def measure(kind: Kind, num_jobs: int, num_slots: int, *, with_plain: bool) -> Measured:
    """Solve for ``num_jobs`` jobs, again after an event, and by the plain program."""
    rng = np.random.default_rng(1)
    curves = [kind(rng) for _ in range(num_jobs)]
    changed = iter([kind(rng) for _ in range(TURNS)])

    def event() -> None:
        curves[num_jobs // 2] = next(changed)
        solve(curves, num_slots)

    solving, after_event = seconds(lambda: solve(curves, num_slots)), seconds(event)
    measured = Measured(num_jobs, num_slots, kind.__name__, 1e3 * solving, 1e3 * after_event)
    if not with_plain:
        return measured
    begun = time.process_time()
    optimum = plain(curves, num_slots)
    return replace(
        measured,
        plain_ms=1e3 * (time.process_time() - begun),
        difference=abs(worth(curves, solve(curves, num_slots)) - optimum) / optimum,
    )


def demands(num: int) -> Iterator[Demand]:
    """Yield jobs with measured throughputs and batches that may grow eightfold."""
    rng = np.random.default_rng(1)
    for number in range(1, num + 1):
        line = Line(rng.uniform(0.0, 0.02), rng.uniform(0.0005, 0.005))
        inside, across = Line(rng.uniform(0.0, 0.05), 0.001), Line(rng.uniform(0.05, 0.2), 0.002)
        yield Demand(
            job=f"job-{number}",
            number=number,
            priority=5000,
            least=1,
            most=MOST,
            batch_size=64,
            batch=BatchRange(64, 512),
            throughput=Throughput(None, line, inside, across, num_measured=5, micro_batch_size=128),
            slots_per_host=8,
        )


def measure_policy(num_jobs: int, num_slots: int) -> Measured:
    """Let elastic-batch decide about jobs that it has never seen, and after one has changed."""
    jobs = list(demands(num_jobs + TURNS))
    changed = iter([replace(job, job="job-1") for job in jobs[num_jobs:]])
    jobs = jobs[:num_jobs]

    def event() -> None:
        jobs[0] = next(changed)
        elastic_batch(jobs, num_slots)

    first = seconds(lambda: elastic_batch(jobs, num_slots), turns=1)
    return Measured(num_jobs, num_slots, "policy elastic-batch", 1e3 * first, 1e3 * seconds(event))


def row(measured: Measured) -> tuple[str, ...]:
    """Return the cells of the table."""
    return (
        f"{measured.jobs} x {measured.slots}, {measured.curves}",
        f"{measured.solve_ms:.1f}",
        f"{measured.event_ms:.1f}",
        "-" if measured.plain_ms is None else f"{measured.plain_ms:.0f}",
        "-" if measured.difference is None else f"{measured.difference:.0e}",
    )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON instead")
    options = parser.parse_args()
    small, middle, large = options.length.pick(
        full=((100, 400), (1000, 4096), (10_000, 100_000)),
        quick=((100, 400), (1000, 4096), (10_000, 100_000)),
        tiny=((10, 40), (20, 80), (40, 400)),
    )
    plain_at_large = options.length.pick(full=(hosts,), quick=(), tiny=(hosts,))
    found = [
        measure(kind, *size, with_plain=size != large or kind in plain_at_large)
        for size in (small, middle, large)
        for kind in KINDS
    ]
    found += [measure_policy(*size) for size in (small, middle, large)]
    if options.json:
        print(json.dumps([vars(measured) for measured in found]))
        return
    header = ("jobs x slots, curves", "decision ms", "after an event ms", "plain program ms", "difference")
    print_table("Processor time of a decision", header, [row(measured) for measured in found])
    solved = [measured for measured in found if not measured.curves.startswith("policy")]
    at_middle = [measured for measured in solved if (measured.jobs, measured.slots) == middle]
    at_large = [measured for measured in solved if (measured.jobs, measured.slots) == large]
    targets = (
        Target("1,000 jobs, 4,096 slots, the slowest", max(m.solve_ms for m in at_middle), 50.0, "ms"),
        Target("10,000 jobs, 100,000 slots, the slowest", max(m.solve_ms for m in at_large), 1000.0, "ms"),
        Target("an event among 1,000 jobs, the slowest", max(m.event_ms for m in at_middle), 10.0, "ms"),
        Target("difference from the optimum, 1e-9", max(1e9 * (m.difference or 0.0) for m in solved), 0.0),
    )
    conclude(targets, options.length)


if __name__ == "__main__":
    main()
