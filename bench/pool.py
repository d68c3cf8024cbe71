"""A whole pool: how fast a change of priority takes effect, hop by hop, and what the platform costs a job.

    python bench/pool.py [--quick | --tiny] [--changes 20] [--only changes|overhead]

Changes: two jobs train an MLP with AdamW on one host of 4 slots. The priority of the second one goes up and down, so
that they have 3 and 1 workers, then 2 and 2, and so on: each time one job shrinks, and the other grows onto its slot.
The time runs from the command until the first iteration of the new membership begins. The hops are the spans of the
trace that the command began; a collector in the bench takes them from the services.

Overhead: one job alone on a pool, and the same script by `resile run` with as many workers, in turns of a few seconds:
while one runs, all processes of the other are stopped.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil
from jobs import SCRIPT, arguments, pool_up, submit, traced
from report import Target, argument_parser, conclude, print_table
from stamps import Stamps

from resile.client import AsyncClient
from resile.pool.services import PoolOptions
from resile_shared.messages.jobs import DEFAULT_PRIORITY
from resile_testing.collector import Collector, Span

NUM_SLOTS = 4
LOW_PRIORITY = DEFAULT_PRIORITY // 3  # 3 slots for the other job, 1 for this one
STEADY = 20
"""Iterations before a change, and as many after it has settled, that tell how long one takes."""
SETTLE = 10
NUM_WORKERS = 2
"""Of the job whose speed is compared."""
WARM_UP = 30
PATIENT_SECONDS = 60.0  # who is frozen for a turn is not lost
POLL_SECONDS = 0.02
PATIENCE_SECONDS = 120.0
COMMAND = "POST /v1/jobs/{job}/priority"


class Job:
    """A job of the pool, and the times at which its iterations were committed."""

    def __init__(self, client: AsyncClient, id_: str, stamps: Stamps) -> None:
        self.id = id_
        self._client = client
        self._stamps = stamps

    @classmethod
    async def submit(cls, client: AsyncClient, folder: Path, *, name: str, script: Path = SCRIPT) -> "Job":
        stamps = Stamps(folder / f"{name}.stamps")
        return cls(client, await submit(client, stamps, name=name, max_workers=3, script=script), stamps)

    def stamps(self) -> list[float]:
        """When each iteration was committed, on the monotonic clock."""
        return [stamp.time for stamp in self._stamps.read()]

    async def trains_on(self, workers: int) -> int:
        """Wait until it has trained long enough with so many workers; return their first iteration."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                last = [item for item in (await self._client.job(self.id)).history if item.kind == "allocation"][-1:]
                if last and last[0].workers == workers and len(self.stamps()) > last[0].iteration + SETTLE + STEADY:
                    return last[0].iteration
                await asyncio.sleep(10 * POLL_SECONDS)


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


async def flip(client: AsyncClient, folder: Path, num_changes: int, *, script: Path = SCRIPT) -> list[Commanded]:
    """Change the priority of the second of two jobs of ``script`` back and forth."""
    one, two = [await Job.submit(client, folder, name=name, script=script) for name in ("one", "two")]
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
        with traced() as collector:
            async with pool_up(folder / "home", PoolOptions(hosts=1, slots=NUM_SLOTS)) as client:
                commands = await flip(client, folder, num_changes)
        return [command.changes() for command in commands], list(traced_hops(commands, collector))


def traced_hops(commands: Sequence[Commanded], collector: Collector) -> Iterator[list[float] | None]:
    for command, trace in zip(commands, collector.started_by(COMMAND), strict=True):
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


@dataclass(frozen=True)
class Turn:
    """How long one side runs while the other is frozen, in seconds."""

    thaw: float
    """Not measured."""
    measured: float


TURN, TINY_TURN = Turn(2.0, 8.0), Turn(0.5, 1.0)


async def measure_overhead(rounds: int, turn: Turn) -> list[tuple[float, float]]:
    """Return iterations per second in a pool and without one, of each round."""
    with tempfile.TemporaryDirectory(prefix="resile-bench-") as name:
        folder = Path(name)
        options = PoolOptions(hosts=1, slots=NUM_SLOTS, detection_seconds=PATIENT_SECONDS)
        async with pool_up(folder / "home", options) as client:
            in_pool, in_run = (Stamps(folder / f"{name}.stamps") for name in ("pool", "run"))
            await submit(client, in_pool, name="pool", min_workers=NUM_WORKERS, max_workers=NUM_WORKERS)
            with running(folder, in_run) as process:
                await asyncio.gather(warm(in_pool), warm(in_run))
                run = [process, *process.children(recursive=True)]
                pool = [child for child in psutil.Process().children(recursive=True) if child not in run]
                sides = [Side(in_pool, pool), Side(in_run, run)]
                return await in_turns(sides, rounds, turn)


@contextmanager
def running(folder: Path, stamps: Stamps) -> Iterator[psutil.Process]:
    """`resile run` of the same script, while the block runs."""
    command = ("run", str(SCRIPT), "--workers", str(NUM_WORKERS), "--", *arguments(stamps.path))
    process = psutil.Popen(
        [sys.executable, "-m", "resile", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"RESILE_HOME": str(folder / "run")},
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@dataclass(frozen=True)
class Side:
    """One of two that are compared: all its processes, and where it notes its iterations."""

    stamps: Stamps
    processes: Sequence[psutil.Process]

    async def take_turn(self, turn: Turn) -> float:
        """Be the only one that runs, for a while; return iterations per second, without the first moments."""
        for process in self.processes:
            process.resume()
        await asyncio.sleep(turn.thaw)
        begin = time.monotonic()
        await asyncio.sleep(turn.measured)
        self.freeze()
        stamps = [stamp.time for stamp in self.stamps.read() if stamp.time >= begin]
        return (len(stamps) - 1) / (stamps[-1] - stamps[0])

    def freeze(self) -> None:
        for process in self.processes:
            process.suspend()


async def in_turns(sides: Sequence[Side], rounds: int, turn: Turn) -> list[tuple[float, float]]:
    """Measure each side while the other is frozen, again and again; what else the machine does meets both alike."""
    for side in sides:
        side.freeze()
    try:
        found = []
        for number in range(rounds):
            order = list(range(len(sides)))[:: -1 if number % 2 else 1]  # who is first is last in the next round
            speeds = {index: await sides[index].take_turn(turn) for index in order}
            found.append((speeds[0], speeds[1]))
        return found
    finally:
        for side in sides:
            for process in side.processes:
                process.resume()


async def warm(stamps: Stamps) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(stamps.read()) < WARM_UP:  # noqa: ASYNC110 - another process writes
            await asyncio.sleep(10 * POLL_SECONDS)


def print_overhead(speeds: Sequence[tuple[float, float]]) -> list[Target]:
    in_pool, in_run = (statistics.median(found) for found in zip(*speeds, strict=True))
    ratio = statistics.median(pool / run for pool, run in speeds)
    rows = [
        ("a job alone on a pool", f"{in_pool:.1f}", f"{ratio:.3f}"),
        ("`resile run`, no pool", f"{in_run:.1f}", "1"),
    ]
    title = f"Iterations per second with {NUM_WORKERS} workers, medians of {len(speeds)} pairs of turns"
    print_table(title, ("", "iterations / s", "ratio"), rows)
    return [Target("time of an iteration on a pool by that of `resile run`", 1 / ratio, 1 / 0.97)]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--changes", type=int, help="of priority")
    parser.add_argument("--only", choices=["changes", "overhead"])
    args = parser.parse_args()
    length = args.length

    verdicts: list[Target] = []
    if args.only != "overhead":
        verdicts += print_changes(*asyncio.run(measure_changes(args.changes or length.pick(full=20, quick=5, tiny=1))))
    if args.only != "changes":
        verdicts += print_overhead(
            asyncio.run(measure_overhead(*length.pick(full=(10, TURN), quick=(2, TURN), tiny=(1, TINY_TURN))))
        )
    conclude(verdicts, length)


if __name__ == "__main__":
    main()
