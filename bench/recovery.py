"""Recovery: what it costs that workers or hosts die, or freeze.

    python bench/recovery.py [--quick | --tiny] [--kills N] [--only workers hosts frozen run batches torchrun torchft]

Four workers train an MLP with AdamW. At a random moment of an iteration a random one of them is killed (kill -9), or a
whole host at once (its agent, with all below it), or a worker is frozen (SIGSTOP). The time runs until the survivors
have committed an iteration; `strikes.py` says how. When four train again, the next one is hit.

- workers, hosts, frozen: a job on a pool of two hosts of two slots.
- run: the launcher of `resile run`.
- batches: the same, where the body of the loop runs once for each batch.
- torchrun: torchrun elastic, two agents of two workers, DistributedDataParallel on gloo, a checkpoint every 10
  iterations.
- torchft: four replicas on gloo. It is installed into a folder of its own, and left out where that does not work.
"""

import asyncio
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from jobs import SCRIPT, arguments, pool_up, submit, traced
from peers import Unusable, torchft, torchrun
from report import Target, argument_parser, conclude, print_table
from stamps import Stamps
from strikes import NotRecovered, Recovery, Struck, strike

from resile.chaos.attacks import Target as AttackTarget
from resile.chaos.attacks import TargetKind
from resile.chaos.processes import PoolProcesses
from resile.local.run import LocalRun
from resile.local.settings import RunSettings
from resile.pool import supervisor
from resile.pool.services import PoolOptions
from resile_testing.collector import Span

NUM_WORKERS = 4
NUM_HOSTS = 2
BINS = (0.05, 0.1, 0.15, 0.25, 0.5)


class JobOnPool:
    """A job of a pool that is hit at one of its workers, or at a whole host."""

    size = NUM_WORKERS

    def __init__(self, stamps: Stamps, *, hits_hosts: bool) -> None:
        self.stamps = stamps
        self._hits_hosts = hits_hosts
        self._processes = PoolProcesses(os.getpid())

    def victims(self, chance: random.Random) -> Sequence[int]:
        """Return a worker, or an agent and all below it."""
        if self._hits_hosts:
            host = chance.choice(sorted(self._processes.hosts()))
            return self._processes.victims(AttackTarget(TargetKind.HOST, host))
        return [chance.choice(self._processes.workers()).pid]

    async def mend(self) -> None:
        """The pool does that."""


@asynccontextmanager
async def job_on_pool(folder: Path, *, hits_hosts: bool = False) -> AsyncIterator[Struck]:
    """A pool with one job, while the block runs. Agents that die are restarted at once, however often."""
    supervisor.MAX_BACKOFF_SECONDS = supervisor.MIN_BACKOFF_SECONDS
    stamps = Stamps(folder / "stamps")
    options = PoolOptions(hosts=NUM_HOSTS, slots=NUM_WORKERS // NUM_HOSTS)
    async with pool_up(folder / "home", options) as client:
        await submit(client, stamps, name="struck", max_workers=NUM_WORKERS)
        yield JobOnPool(stamps, hits_hosts=hits_hosts)


class Local:
    """A run without a pool that is hit at one of its workers."""

    size = NUM_WORKERS

    def __init__(self, run: LocalRun, stamps: Stamps) -> None:
        self.stamps = stamps
        self._run = run

    def victims(self, chance: random.Random) -> Sequence[int]:
        """Return a worker."""
        return [chance.choice(sorted(self._run.pids.values()))]

    async def mend(self) -> None:
        """The launcher does that."""


@asynccontextmanager
async def local_run(folder: Path, *, body: str = "shard") -> AsyncIterator[Struck]:
    """A `resile run`, while the block runs."""
    stamps = Stamps(folder / "stamps")
    args = arguments(stamps.path, body=body)
    run = LocalRun(RunSettings(SCRIPT, args=args, workers=NUM_WORKERS, home=folder / "home"))
    training = asyncio.create_task(run.run())
    try:
        yield Local(run, stamps)
    finally:
        training.cancel()
        with suppress(asyncio.CancelledError):
            await training


@dataclass(frozen=True)
class Part:
    """One way to disturb a training: how often at full length and in a quick run, and what it may take."""

    label: str
    open: Callable[[Path], AbstractAsyncContextManager[Struck]]
    times: int
    quick: int
    sent: signal.Signals = signal.SIGKILL
    median: float | None = None
    """Limits in seconds; of a peer there is none."""
    p99: float | None = None
    is_traced: bool = False
    """Whether traces show where the time goes."""
    tiny: int = 1
    """0: left out of a tiny run, since another part has the same code, or it needs more than Resile."""


PARTS = {
    "workers": Part("a worker of a pool, killed", job_on_pool, 200, 12, median=0.15, p99=0.5, is_traced=True),
    "hosts": Part("a host, killed", partial(job_on_pool, hits_hosts=True), 50, 3, median=0.15, p99=0.5, is_traced=True),
    "frozen": Part(
        "a worker of a pool, frozen",
        job_on_pool,
        20,
        2,
        signal.SIGSTOP,
        p99=PoolOptions().detection_seconds + 0.5,
        is_traced=True,
        tiny=0,
    ),
    "run": Part("a worker of `resile run`, killed", local_run, 50, 5, median=0.15, p99=0.5),
    "batches": Part(
        "a worker of `resile run`, killed, a body for each batch",
        partial(local_run, body="batch"),
        50,
        5,
        median=0.15,
        p99=0.5,
        tiny=0,
    ),
    "torchrun": Part("torchrun: a worker, killed", torchrun, 10, 1, tiny=0),
    "torchft": Part("torchft: a replica, killed", torchft, 10, 2, tiny=0),
}


async def measure(part: Part, times: int) -> tuple[list[Recovery], list[list[float]]]:
    """Return what the strikes of one part did, and when the hops of their traces ended."""
    with tempfile.TemporaryDirectory(prefix="resile-bench-") as name, ExitStack() as stack:
        collector = stack.enter_context(traced()) if part.is_traced else None
        clocks = time.time() - time.monotonic()
        async with part.open(Path(name)) as training:
            found = await strike(training, times=times, sent=part.sent)
        spans = [span for trace in collector.traces.values() for span in trace] if collector else []
        return found, [ends for recovery in found if (ends := hops(recovery, recovery.struck + clocks, spans))]


HOPS = ("a peer or the agent noticed", "agents have read who goes on", "all go on", "an iteration is committed")


def hops(recovery: Recovery, struck: float, spans: Sequence[Span]) -> list[float] | None:
    """Return when each of `HOPS` ended, in seconds since the strike; None if the traces do not show it."""
    later = [span for span in spans if span.begin >= struck]
    noticed = [span for span in later if span.name == "worker is gone" or span.name.endswith(".lost")]
    ours = [span for span in later if str(span.attributes.get("generation")) == recovery.membership]
    read = [span for span in ours if span.name == "carry out allocation"]
    formed = [span for span in ours if span.name == "form generation"]
    if not (noticed and read and formed):
        return None
    ends = min(span.begin for span in noticed), min(span.begin for span in read), max(span.end for span in formed)
    return [*(end - struck for end in ends), recovery.seconds]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of all do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def row(part: Part, found: Sequence[Recovery]) -> Sequence[str]:
    took = [recovery.seconds for recovery in found]
    figures = (statistics.median(took), percentile(took, 0.99), max(took))
    usual = statistics.median(recovery.usual for recovery in found)
    lost = sum(recovery.lost for recovery in found)
    return part.label, str(len(found)), *(f"{seconds * 1e3:.0f}" for seconds in (usual, *figures)), str(lost)


def spread(part: Part, found: Sequence[Recovery]) -> Sequence[str]:
    edges = (0.0, *BINS, float("inf"))
    counts = [sum(low < recovery.seconds <= high for recovery in found) for low, high in pairwise(edges)]
    return part.label, *map(str, counts)


def targets(part: Part, found: Sequence[Recovery]) -> Iterator[Target]:
    took = [recovery.seconds * 1e3 for recovery in found]
    if part.median:
        yield Target(f"{part.label}: median", statistics.median(took), part.median * 1e3, "ms")
    if part.p99:
        yield Target(f"{part.label}: p99", percentile(took, 0.99), part.p99 * 1e3, "ms")
        yield Target(f"{part.label}: committed iterations lost", sum(recovery.lost for recovery in found), 0)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--kills", type=int, help="strikes of each part")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    args = parser.parse_args()
    length = args.length

    rows, spreads, hop_rows, verdicts = [], [], [], []
    for name in args.only:
        part = PARTS[name]
        times = args.kills or length.pick(full=part.times, quick=part.quick, tiny=part.tiny)
        if not times:
            print(f"{part.label}: left out of a tiny run")
            continue
        try:
            found, ends = asyncio.run(measure(part, times))
        except (Unusable, NotRecovered) as error:
            print(f"{part.label}: {error}", file=sys.stderr)
            verdicts += [Target(f"{part.label}: recovers", float("inf"), 0)] if part.p99 else []
            continue
        rows.append((*row(part, found), f"{os.getloadavg()[0]:.1f}"))
        spreads.append(spread(part, found))
        if ends:
            since = [f"{statistics.median(hop) * 1e3:.0f}" for hop in zip(*ends, strict=True)]
            hop_rows.append((part.label, str(len(ends)), *since))
        verdicts += targets(part, found)
    header = ("", "strikes", "iteration ms", "median ms", "p99 ms", "max ms", "iterations lost", "load")
    print_table("From the signal to the next committed iteration", header, rows)
    bins = [f"to {seconds * 1e3:g}" for seconds in BINS]
    print_table("How many took so many ms", ("", *bins, "more"), spreads)
    if hop_rows:
        print_table("The hops of those on a pool, medians in ms since the signal", ("", "traces", *HOPS), hop_rows)
    conclude(verdicts, length)


if __name__ == "__main__":
    main()
