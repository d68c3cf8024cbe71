"""How near 16 accelerators on 4 hosts come to 16 times the speed of one, and where the rest of the time goes.

    python bench/shards.py [--quick | --tiny] [--seconds 1] [--megabytes 4] [--megabits 10000]

Accelerators are emulated: one that computes takes time and no processor, so that few cores can serve many workers
(emulated.py). Everything else is real: a pool, as root with each host in a network namespace of its own, behind a link
of a given speed; and jobs of 1, 4, 8 and 16 workers, one after the other, which share the same 16 shards.

An iteration is divided into what the accelerator of a worker takes; how much later the slowest worker has all its
gradients; and what the exchange takes from then on. All workers run on the cores of this machine: the processor time of
an iteration, of all workers by the number of cores, is what the machine cannot do in less.
"""

import asyncio
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import namespaces
from jobs import pool_up
from report import Target, argument_parser, conclude, print_table

from resile.client import AsyncClient
from resile.package import pack
from resile.pool.namespaces import Namespaces
from resile.pool.services import PoolOptions
from resile_shared.messages.jobs import JobSpec

SCRIPT = Path(__file__).resolve().with_name("emulated.py")
SLOTS_PER_HOST = 4
SKIPPED = 3
"""First iterations of a job: in some of them all workers compute a shard for comparison."""
POLL_SECONDS = 0.1
PATIENCE_SECONDS = 300.0
EFFICIENCY = 0.95


@dataclass(frozen=True)
class Work:
    """What a job trains."""

    num_shards: int
    shard_seconds: float
    megabytes: float
    """Of gradients."""


@dataclass(frozen=True)
class Iteration:
    """Medians over the iterations of a job, in seconds."""

    whole: float
    late: float
    """How much longer than its accelerator took the slowest worker computed."""
    exchange: float
    """From when all have computed until all have the sums."""
    processor: float
    """Processor time of all workers."""


Note = tuple[float, float, float]
"""When a worker had computed and when it had the sums, and its processor time until then."""


def medians(notes: Sequence[Mapping[int, Note]], *, busy_seconds: float) -> Iteration:
    """Sum up what the workers of a job noted, each by iteration; an accelerator is busy for ``busy_seconds``."""
    numbers = sorted(set.intersection(*({*worker} for worker in notes)))[SKIPPED - 1 :]
    found = []
    for before, number in pairwise(numbers):
        begun, computed, done = (
            max(worker[at][part] for worker in notes) for at, part in ((before, 1), (number, 0), (number, 1))
        )
        processor = sum(worker[number][2] - worker[before][2] for worker in notes)
        found.append((done - begun, computed - begun - busy_seconds, done - computed, processor))
    return Iteration(*(statistics.median(column) for column in zip(*found, strict=True)))


async def train(client: AsyncClient, folder: Path, work: Work, *, workers: int, iterations: int) -> Iteration:
    """Train a job of so many workers to its end."""
    notes = folder / f"{workers}.notes"
    notes.mkdir()
    settings = {
        "--num-shards": work.num_shards,
        "--iterations": SKIPPED + iterations,
        "--shard-seconds": work.shard_seconds,
        "--parameters": round(work.megabytes * 1e6) // 4,
        "--notes": notes,
    }
    package = await asyncio.to_thread(pack, SCRIPT)
    spec = JobSpec(
        name=f"on {workers}",
        package=await client.upload(package.content),
        script=package.script,
        args=tuple(str(word) for pair in settings.items() for word in pair),
        min_workers=workers,
        max_workers=workers,
    )
    id_ = await client.submit(spec)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (job := await client.job(id_)).state.is_final:  # noqa: ASYNC110 - another process trains
            await asyncio.sleep(POLL_SECONDS)
    if job.iteration < SKIPPED + iterations:
        raise SystemExit(f"the job on {workers} workers could not be measured: it is {job.state}")
    busy_seconds = -(-work.num_shards // workers) * work.shard_seconds
    return medians([_read(file) for file in notes.iterdir()], busy_seconds=busy_seconds)


def _read(file: Path) -> dict[int, Note]:
    lines = [line.split() for line in file.read_text().splitlines()]
    return {int(number): (float(computed), float(done), float(used)) for number, computed, done, used in lines}


async def measure(sizes: Mapping[int, int], work: Work, *, hosts: int, megabits: float | None) -> dict[int, Iteration]:
    """Return what iterations take, by number of workers; ``sizes`` says how many iterations are measured for each."""
    with tempfile.TemporaryDirectory(prefix="resile-bench-") as name:
        home = Path(name) / "home"
        options = PoolOptions(hosts=hosts, slots=SLOTS_PER_HOST, namespaces=megabits is not None)
        async with pool_up(home, options) as client:
            if megabits:
                network = Namespaces.of(home)
                for host in options.host_names:
                    network.slow(host, f"{megabits:g}mbit")
            return {
                workers: await train(client, Path(name), work, workers=workers, iterations=iterations)
                for workers, iterations in sizes.items()
            }


def print_results(found: Mapping[int, Iteration], work: Work) -> list[Target]:
    """Print a row for each number of workers, and return the target for the most."""
    alone = found[1].whole
    cores = len(os.sched_getaffinity(0))
    rows = []
    for workers, iteration in found.items():
        parts = (iteration.whole, iteration.late, iteration.exchange, iteration.processor / cores)
        speed_up = alone / iteration.whole
        cells = (*(f"{seconds * 1e3:.1f}" for seconds in parts), f"{speed_up:.2f}", f"{speed_up / workers:.3f}")
        rows.append((str(workers), *cells))
    header = ("workers", "iteration ms", "late ms", "exchange ms", f"processor ms / {cores}", "speed-up", "of linear")
    title = (
        f"{work.num_shards} shards of {work.shard_seconds * 1e3:g} ms on emulated accelerators, {SLOTS_PER_HOST} a "
        f"host, {work.megabytes:g} MB of gradients"
    )
    print_table(title, header, rows)
    most = max(found)
    return [Target(f"linear by the speed of {most} workers", most * found[most].whole / alone, 1 / EFFICIENCY)]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, help="that a shard takes (1)")
    parser.add_argument("--megabytes", type=float, default=4.0, help="of gradients (4)")
    parser.add_argument(
        "--megabits", type=float, default=10000.0, help="a second that the link of a host carries (10000)"
    )
    args = parser.parse_args()
    length = args.length
    hosts, shard_seconds = length.pick(full=(4, 1.0), quick=(4, 1.0), tiny=(2, 0.01))
    sizes = length.pick(full={1: 2, 4: 5, 8: 10, 16: 50}, quick={1: 1, 8: 3, 16: 15}, tiny={1: 1, 2: 1, 8: 1})
    work = Work(max(sizes), args.seconds or shard_seconds, args.megabytes)
    reason = namespaces.why_impossible()
    if reason is not None:
        print(f"hosts without a network of their own: {reason}")
    megabits = args.megabits if reason is None else None
    found = asyncio.run(measure(sizes, work, hosts=hosts, megabits=megabits))
    conclude(print_results(found, work), length)


if __name__ == "__main__":
    main()
