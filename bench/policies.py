"""What it earns to choose batch sizes together with slots: jobs completed, completion times and drops.

    python bench/policies.py [--quick | --tiny] [--data DIR] [--seeds 10] [--slots 40 400] [--jobs NAME ...] [--json]

Jobs arrive at random for 4 hours and are shared out by the policy elastic-batch, at each arrival and each completion:
once with batches from the least to 8 times as much, and with each batch fixed to the least, the most, or one of 1, 2, 4
and 8 times the least at random. A job trains at the speed of its throughput model, is complete after so many samples,
and loses a second when its workers or its batch change.

DIR has a CSV file for each model with iterations per second by global batch (rows) and number of workers (columns), as
ElasticFlow's throughputs_A100; a throughput is fitted to each. Synthetic jobs are compute-bound, balanced or
communication-bound. The load is what arrives, in slot-seconds on one slot at the least batch, by what the slots have:
low is 0.5 of it, high 1.5, bursty 0.8 in bursts of a twentieth of the time.

Workloads are replayed on all processors; stderr says how far that is.
"""

import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import numpy as np
from report import argument_parser, print_table

from resile_scheduler.policies.demand import BatchRange, Demand
from resile_scheduler.policies.elastic_batch import elastic_batch
from resile_scheduler.simulation.throughputs import SLOTS_PER_HOST, Model, read_models, synthetic_models

GROWTH = 8
MOST_WORKERS = 16
CHANGE_SECONDS = 1.0
MEAN_SECONDS = 3600.0
"""What a job takes on one slot at its least batch, in the mean; their spread is lognormal."""
HORIZON = 4 * 3600.0
LOADS = {"low": 0.5, "high": 1.5, "bursty": 0.8}
BURSTS = 20
FIXED = ("least", "random", "most")
"""How batches are fixed."""
PROGRESS_SECONDS = 5.0


@dataclass(eq=False)
class Job:
    """A job, and how far it is. Times are seconds."""

    demand: Demand
    model: Model
    submitted: float
    samples: float
    """That it still has to train."""
    workers: int = 0
    batch: int = 0
    rate: float = 0.0
    pause: float = 0.0
    completed: float | None = None
    _waiting: Demand = field(init=False)
    _holding: Demand = field(init=False)

    def __post_init__(self) -> None:
        self._waiting, self._holding = self.demand, replace(self.demand, holds_slots=True)

    def seen(self) -> Demand:
        """Return what the policy sees."""
        return self._holding if self.workers else self._waiting

    def assign(self, workers: int, batch: int) -> None:
        """Train with these from now on."""
        if (workers, batch) == (self.workers, self.batch):
            return
        self.workers, self.batch, self.pause = workers, batch, CHANGE_SECONDS
        self.rate = float(self.model.throughput.rate(workers, batch, across=workers > SLOTS_PER_HOST))

    def remaining(self) -> float:
        """Return the seconds to its completion."""
        return self.pause + self.samples / self.rate

    def advance(self, seconds: float) -> None:
        """Train for ``seconds``."""
        training = max(seconds - self.pause, 0.0)
        self.pause = max(self.pause - seconds, 0.0)
        self.samples -= training * self.rate


def arrivals(models: Sequence[Model], load: str, num_slots: int, seed: int, *, batches: str) -> list[Job]:
    """Return the jobs of one workload. ``batches``: elastic, or fixed to least, most or random."""
    rng = np.random.default_rng(seed)
    num = round(LOADS[load] * num_slots * HORIZON / MEAN_SECONDS)
    times = rng.uniform(0.0, HORIZON, num)
    if load == "bursty":
        begins = rng.choice(BURSTS, 3, replace=False) * HORIZON / BURSTS
        times = rng.choice(begins, num) + rng.uniform(0.0, HORIZON / BURSTS, num)
    jobs = []
    for number, time in enumerate(sorted(times.tolist()), 1):
        model = models[int(rng.integers(len(models)))]
        factors = {"least": 1, "most": GROWTH, "random": int(2 ** rng.integers(4))}
        least, most = (factors[batches],) * 2 if batches in factors else (1, GROWTH)
        demand = Demand(
            job=f"job-{number}",
            number=number,
            priority=5000,
            least=1,
            most=MOST_WORKERS,
            batch=BatchRange(least * model.least_batch, most * model.least_batch),
            throughput=model.throughput,
            slots_per_host=SLOTS_PER_HOST,
        )
        alone = float(model.throughput.rate(1, model.least_batch))
        samples = alone * MEAN_SECONDS * float(rng.lognormal(-0.5, 1.0))
        jobs.append(Job(demand, model, time, samples))
    return jobs


def replay(jobs: Sequence[Job], num_slots: int, *, drops: bool) -> None:
    """Let all jobs arrive and train to their end; with ``drops``, one that gets no slot at once is dropped."""
    active: list[Job] = []
    now = 0.0
    coming = list(reversed(jobs))
    while active or coming:
        running = [job for job in active if job.workers]
        done = min(running, key=Job.remaining, default=None)
        then = min(now + done.remaining() if done else np.inf, coming[-1].submitted if coming else np.inf)
        for job in running:
            job.advance(then - now)
        now = then
        if coming and coming[-1].submitted <= now:
            active.append(coming.pop())
        elif done:
            done.completed = now
            active.remove(done)
        _share(active, num_slots)
        if drops:
            active = [job for job in active if job.workers]


def _share(active: Sequence[Job], num_slots: int) -> None:
    """Let the policy decide; the jobs far back in the queue need not be looked at, for each gets a slot at least."""
    seen = sorted(active, key=lambda job: job.workers == 0)[:num_slots]
    targets = elastic_batch([job.seen() for job in seen], num_slots)
    for job in seen:
        target = targets[job.demand.job]
        if target.batch_size is not None:
            job.assign(target.workers, target.batch_size)


class Task(NamedTuple):
    """One workload whose batches are chosen in one way."""

    slots: int
    jobs: str
    load: str
    seed: int
    batches: str

    @property
    def num_jobs(self) -> float:
        """About how many jobs it has: what it takes rises with their number."""
        return LOADS[self.load] * self.slots


class Outcome(NamedTuple):
    """What became of the jobs of one workload."""

    completed: int
    """Within the time in which jobs arrive."""
    mean_seconds: float
    """From submission to completion, of all."""
    dropped: float
    """The share of the jobs that gets no slot at once, where there is no queue."""


def outcome(models: Sequence[Model], task: Task) -> Outcome:
    """Replay one workload twice: with a queue, and with drops."""
    queued, dropping = (arrivals(models, task.load, task.slots, task.seed, batches=task.batches) for _ in range(2))
    replay(queued, task.slots, drops=False)
    replay(dropping, task.slots, drops=True)
    times = [(job.submitted, job.completed) for job in queued if job.completed is not None]
    return Outcome(
        completed=sum(end <= HORIZON for _, end in times),
        mean_seconds=statistics.mean(end - begin for begin, end in times),
        dropped=sum(job.completed is None for job in dropping) / len(dropping),
    )


def outcomes(tasks: Sequence[Task], models: dict[str, list[Model]]) -> dict[Task, Outcome]:
    """Replay all workloads, on all processors; say on stderr how far they are."""
    total, done, shown, begun = sum(task.num_jobs for task in tasks), 0.0, 0.0, monotonic()
    found: dict[Task, Outcome] = {}
    with ProcessPoolExecutor() as pool:
        largest_first = sorted(tasks, key=lambda task: -task.num_jobs)
        running = {pool.submit(outcome, models[task.jobs], task): task for task in largest_first}
        for future in as_completed(running):
            task = running[future]
            found[task] = future.result()
            done += task.num_jobs
            taken = monotonic() - begun
            if taken - shown >= PROGRESS_SECONDS:
                shown, left = taken, taken * (total / done - 1.0)
                print(f"{len(found)} of {len(tasks)} workloads, about {left:.0f} s left", file=sys.stderr, flush=True)
    return found


def compare(elastic: Outcome, fixed: Outcome) -> tuple[float, ...]:
    """Return the ratios of jobs completed and of completion times, and both drops."""
    ratios = elastic.completed / max(fixed.completed, 1), fixed.mean_seconds / elastic.mean_seconds
    return (*ratios, fixed.dropped, elastic.dropped)


def spread(values: Sequence[float]) -> str:
    """Return the mean and the standard deviation."""
    return f"{statistics.mean(values):.2f} ± {statistics.pstdev(values):.2f}"


def sets(data: Path | None) -> Iterator[tuple[str, list[Model]]]:
    """Yield the jobs of a workload by name: all measured ones together, and each synthetic kind alone."""
    if data is not None:
        yield "measured", read_models(data)
    for model in synthetic_models():
        yield model.name, [model]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, help="a folder of measured throughputs")
    parser.add_argument("--seeds", type=int, help="how many workloads of each kind")
    parser.add_argument("--jobs", nargs="+", help="only these: measured, or the names of synthetic jobs")
    parser.add_argument("--slots", type=int, nargs="+", help="the sizes of the pool")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead")
    options = parser.parse_args()
    seeds = options.seeds or options.length.pick(full=10, quick=2, tiny=1)
    slots = options.slots or options.length.pick(full=[40, 400], quick=[40], tiny=[4])
    models = {name: models for name, models in sets(options.data) if name in (options.jobs or [name])}
    tasks = list(itertools.starmap(Task, itertools.product(slots, models, LOADS, range(seeds), ("elastic", *FIXED))))
    outcome_of = outcomes(tasks, models)
    found: dict[tuple[int, str, str, str], list[tuple[float, ...]]] = {}
    for task in tasks:
        if task.batches in FIXED:
            elastic = outcome_of[task._replace(batches="elastic")]
            key = (task.slots, task.jobs, task.load, task.batches)
            found.setdefault(key, []).append(compare(elastic, outcome_of[task]))
    if options.json:
        keys, figures_of = ("slots", "jobs", "load", "batches"), ("completed", "speedup", "dropped", "dropped_elastic")
        print(
            json.dumps(
                [
                    dict(zip(keys, key, strict=True), seeds=[dict(zip(figures_of, f, strict=True)) for f in figures])
                    for key, figures in found.items()
                ]
            )
        )
        return
    header = ("slots, jobs, load, batch fixed to", "completed, ratio", "time, ratio", "dropped, fixed", "elastic")
    rows = [
        (", ".join(map(str, key)), *(spread(column) for column in zip(*figures, strict=True)))
        for key, figures in found.items()
    ]
    print_table(f"Elastic batches beside fixed ones, {seeds} workloads of each kind", header, rows)


if __name__ == "__main__":
    main()
