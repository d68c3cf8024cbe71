"""A whole pool: how fast a change of priority takes effect, hop by hop, and what the platform costs a job.

    python bench/pool.py [--quick] [--changes 20] [--only changes|overhead]

Changes: two jobs train an MLP with AdamW on one host of 4 slots. The priority of the second one goes up and down, so
that they have 3 and 1 workers, then 2 and 2, and so on: each time one job shrinks, and the other grows onto its slot.
The time runs from the command until the first iteration of the new membership begins. The hops are the spans of the
trace that the command began; a collector in the bench takes them from the services.

Overhead: one job alone on a pool, and the same script by `resile run` with as many workers and no pool, in turns.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from report import Target, print_table, print_targets
from spans import Collector, Span, collecting

from resile.client import Client, find_server
from resile.package import pack
from resile.pool.home import PoolHome
from resile.pool.services import PoolOptions
from resile.pool.supervisor import Supervisor
from resile_shared.messages.jobs import DEFAULT_PRIORITY, JobSpec

SCRIPT = Path(__file__).resolve().with_name("rescaled.py")
NUM_SLOTS = 4
NUM_SHARDS = 12  # 1, 2 and 3 workers share them evenly
LOW_PRIORITY = DEFAULT_PRIORITY // 3  # 3 slots for the other job, 1 for this one
BATCH_SIZE = 96
STEADY = 20
"""Iterations before a change, and as many after it has settled, that tell how long one takes."""
SETTLE = 10
NUM_WORKERS = 2
"""Of the job whose speed is compared."""
WARM_UP = 30
POLL_SECONDS = 0.02
PATIENCE_SECONDS = 120.0
COMMAND = "POST /v1/jobs/{job}/priority"
ENDPOINT, DELAY = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_BSP_SCHEDULE_DELAY"


class Job:
    """A job of the pool, and the times at which its iterations were committed."""

    def __init__(self, client: Client, id_: str, stamps: Path) -> None:
        self.id = id_
        self._client = client
        self._stamps = stamps

    @classmethod
    async def submit(cls, client: Client, folder: Path, *, name: str, min_workers: int = 1, max_workers: int) -> "Job":
        package = await asyncio.to_thread(pack, SCRIPT)
        stamps = folder / f"{name}.stamps"
        stamps.touch()
        spec = JobSpec(
            name=name,
            package=await client.upload(package.content),
            script=package.script,
            args=arguments(stamps),
            min_workers=min_workers,
            max_workers=max_workers,
        )
        return cls(client, await client.submit(spec), stamps)

    def stamps(self) -> list[float]:
        """When each iteration was committed, on the monotonic clock."""
        return read_stamps(self._stamps)

    async def trains_on(self, workers: int) -> int:
        """Wait until it has trained long enough with so many workers; return their first iteration."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                last = [item for item in (await self._client.job(self.id)).history if item.kind == "allocation"][-1:]
                if last and last[0].workers == workers and len(self.stamps()) > last[0].iteration + SETTLE + STEADY:
                    return last[0].iteration
                await asyncio.sleep(10 * POLL_SECONDS)


def arguments(stamps: Path) -> tuple[str, ...]:
    settings = {"--millions": 1, "--batch-size": BATCH_SIZE, "--num-shards": NUM_SHARDS, "--stamps": stamps}
    return tuple(str(word) for pair in settings.items() for word in pair)


def read_stamps(file: Path) -> list[float]:
    return [float(line.split()[1]) for line in file.read_text().split("\n")[:-1]]


@asynccontextmanager
async def pool_up(home: Path) -> AsyncIterator[Client]:
    """A pool of one host, while the block runs."""
    pool = PoolHome(home)
    ready = asyncio.Event()
    supervisor = Supervisor(pool, PoolOptions(hosts=1, slots=NUM_SLOTS), tell=lambda line: print(line, file=sys.stderr))
    running = asyncio.create_task(supervisor.run(lambda url: ready.set()))
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        async with Client(find_server(home=home)) as client:
            yield client
            for job in await client.jobs():
                await client.stop(job.id)
    finally:
        waiting.cancel()
        running.cancel()
        await asyncio.wait({running})
        await supervisor.kill()
        pool.close()


# changes of priority


@dataclass(frozen=True)
class Change:
    """What one command did to one job, in seconds."""

    effect: float
    iteration_before: float


@dataclass(frozen=True)
class Commanded:
    """One command: when it was sent (on both clocks), which job shrank and which grew, and by which iteration."""

    monotonic: float
    time: float
    shrinking: Job
    growing: Job
    first_shrunk: int
    first_grown: int

    def changes(self) -> tuple[Change, Change]:
        """What became of the job that shrank, and of the one that grew."""
        return self._change(self.shrinking, self.first_shrunk), self._change(self.growing, self.first_grown)

    def _change(self, job: Job, first: int) -> Change:
        stamps = job.stamps()
        last = next(number for number, stamp in enumerate(stamps) if stamp > self.monotonic) - 1
        before = statistics.median(b - a for a, b in pairwise(stamps[last - STEADY : last + 1]))
        settled = stamps[first + SETTLE : first + SETTLE + STEADY + 1]
        new = statistics.median(b - a for a, b in pairwise(settled))
        return Change(stamps[first] - new - self.monotonic, before)


async def flip(client: Client, folder: Path, num_changes: int) -> list[Commanded]:
    """Change the priority of the second of two jobs back and forth."""
    one, two = [await Job.submit(client, folder, name=name, max_workers=3) for name in ("one", "two")]
    await asyncio.gather(one.trains_on(2), two.trains_on(2))
    commands = []
    for number in range(num_changes):
        shrinking, growing = (one, two) if number % 2 else (two, one)
        priority, shrunk, grown = (DEFAULT_PRIORITY, 2, 2) if number % 2 else (LOW_PRIORITY, 1, 3)
        sent = time.monotonic(), time.time()
        await client.set_priority(two.id, priority)
        firsts = await asyncio.gather(shrinking.trains_on(shrunk), growing.trains_on(grown))
        commands.append(Commanded(*sent, shrinking, growing, *firsts))
    return commands


HOPS = (
    "command stored and answered",
    "allocation written, order given",
    "old membership left",
    "process gone, slot released",
    "new allocation written, and read",
    "worker started",
    "script at its training call",
    "new membership formed",
)


def hops(command: Commanded, trace: Sequence[Span]) -> list[float] | None:
    """Return when each of `HOPS` ended, in seconds since the command; None if the trace does not show it."""
    shrinking, growing = command.shrinking.id, command.growing.id

    def of(name: str, job: str) -> list[Span]:
        return [span for span in trace if span.name == name and span.attributes.get("job") == job]

    posted = [span for span in trace if span.name == COMMAND]
    shrunk, grown = of("form generation", shrinking), of("form generation", growing)
    gone = of("worker is gone", shrinking)
    started, ran = of("start worker", growing), of("run script to training call", growing)
    if not (posted and shrunk and grown and gone and started and ran):
        return None
    ends = (
        *(posted[0].end, shrunk[0].begin, shrunk[0].end, gone[0].begin),
        *(started[-1].begin, started[-1].end, ran[-1].end, grown[-1].end),
    )
    return [end - command.time for end in ends]


async def measure_changes(num_changes: int) -> tuple[list[tuple[Change, Change]], list[list[float] | None]]:
    """Return what each command did, and when its hops ended."""
    with tempfile.TemporaryDirectory(prefix="resile-bench-") as name:
        folder = Path(name)
        async with collecting() as (collector, endpoint):
            os.environ |= {ENDPOINT: endpoint, DELAY: "1000"}
            try:
                async with pool_up(folder / "home") as client:
                    commands = await flip(client, folder, num_changes)
            finally:
                del os.environ[ENDPOINT], os.environ[DELAY]
        return [command.changes() for command in commands], list(traced_hops(commands, collector))


def traced_hops(commands: Sequence[Commanded], collector: Collector) -> Iterator[list[float] | None]:
    for command, trace in zip(commands, collector.begun_by(COMMAND), strict=True):
        yield hops(command, trace)


def print_changes(changes: Sequence[tuple[Change, Change]], traces: Sequence[list[float] | None]) -> list[Target]:
    rows, targets = [], []
    for kind, limit, found in zip(("shrink", "grow"), (200, 1200), zip(*changes, strict=True), strict=True):
        effects = [change.effect * 1e3 for change in found]
        before = statistics.median(change.iteration_before for change in found) * 1e3
        spread = f"{statistics.median(effects):.0f} [{min(effects):.0f} to {max(effects):.0f}]"
        rows.append((kind, str(len(found)), f"{before:.1f}", spread))
        late = statistics.median((change.effect - change.iteration_before) * 1e3 for change in found)
        targets.append(Target(f"command to effect of a {kind} less one iteration", late, limit, "ms"))
    title = f"Two jobs (1 M parameters, AdamW) on {NUM_SLOTS} slots, 3 and 1 to 2 and 2 and back, by priority"
    print_table(title, ("", "changes", "iteration before ms", "command to effect ms"), rows)

    whole = [trace for trace in traces if trace is not None]
    targets.append(Target("commands whose trace does not go on to the last hop", len(traces) - len(whole), 0))
    if whole:
        since = [statistics.median(ends) * 1e3 for ends in zip(*whole, strict=True)]
        parts = [[b - a for a, b in pairwise((0.0, *ends))] for ends in whole]
        each = [statistics.median(took) * 1e3 for took in zip(*parts, strict=True)]
        table = [(hop, f"{took:.1f}", f"{at:.1f}") for hop, took, at in zip(HOPS, each, since, strict=True)]
        print_table("The hops of these commands, medians over their traces", ("", "took ms", "since command ms"), table)
    return targets


# what the platform costs


async def speed_in_pool(folder: Path, seconds: float) -> float:
    """Iterations per second of a job that has a pool for itself."""
    async with pool_up(folder / "home") as client:
        await Job.submit(client, folder, name="alone", min_workers=NUM_WORKERS, max_workers=NUM_WORKERS)
        return await speed(folder / "alone.stamps", seconds)


async def speed_in_run(folder: Path, seconds: float) -> float:
    """The same of `resile run`."""
    stamps = folder / "run.stamps"
    stamps.touch()
    command = ("run", str(SCRIPT), "--workers", str(NUM_WORKERS), "--", *arguments(stamps))
    environment = os.environ | {"RESILE_HOME": str(folder / "home")}
    process = subprocess.Popen(  # noqa: ASYNC220 - a few ms
        [sys.executable, "-m", "resile", *command], stdout=subprocess.DEVNULL, env=environment
    )
    try:
        return await speed(stamps, seconds)
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)


async def speed(stamps: Path, seconds: float) -> float:
    """Wait until so many seconds are trained, after a warm-up; return iterations per second in them."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            found = read_stamps(stamps)[WARM_UP:]
            if found and found[-1] - found[0] >= seconds:
                return (len(found) - 1) / (found[-1] - found[0])
            await asyncio.sleep(10 * POLL_SECONDS)


async def measure_overhead(rounds: int, seconds: float) -> list[tuple[float, float]]:
    """Return speeds in a pool and without one, measured in turns."""
    found = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="resile-bench-") as pool, tempfile.TemporaryDirectory() as run:
            found.append((await speed_in_pool(Path(pool), seconds), await speed_in_run(Path(run), seconds)))
    return found


def print_overhead(speeds: Sequence[tuple[float, float]]) -> list[Target]:
    in_pool, in_run = (statistics.median(found) for found in zip(*speeds, strict=True))
    rows = [
        ("a job alone on a pool", f"{in_pool:.1f}", f"{in_pool / in_run:.3f}"),
        ("`resile run`, no pool", f"{in_run:.1f}", "1"),
    ]
    title = f"Iterations per second with {NUM_WORKERS} workers, medians of {len(speeds)} turns"
    print_table(title, ("", "iterations / s", "ratio"), rows)
    return [Target("speed of `resile run` by that of a job on a pool", in_run / in_pool, 1 / 0.97)]


def main() -> None:
    parser = argparse.ArgumentParser(description="What a change of priority and what a pool cost.")
    parser.add_argument("--quick", action="store_true", help="fewer changes and turns")
    parser.add_argument("--changes", type=int, help="of priority")
    parser.add_argument("--only", choices=["changes", "overhead"])
    args = parser.parse_args()

    verdicts: list[Target] = []
    if args.only != "overhead":
        verdicts += print_changes(*asyncio.run(measure_changes(args.changes or (5 if args.quick else 20))))
    if args.only != "changes":
        rounds, seconds = (2, 4.0) if args.quick else (4, 10.0)
        verdicts += print_overhead(asyncio.run(measure_overhead(rounds, seconds)))
    print_targets(verdicts)
    if not all(target.met for target in verdicts):
        sys.exit(1)


if __name__ == "__main__":
    main()
