"""Steady state: an iteration of Resile against one of DistributedDataParallel on gloo, in one run.

    python bench/steady.py [--quick] [--workloads digits gpt] [--workers 1 2 4]

For each model and number of workers five trainings live side by side and take turns, a block of iterations each: DDP, the
same processes without DDP (compute alone), and Resile with V = N (the cut that DDP makes), with the default V, and in
fast mode. A ratio compares the medians of neighbouring blocks; the table shows the median ratio and its range.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import socket
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gate import Gate
from report import Target, print_table, print_targets

from resile_learner.local.events import Printed, RunEvent
from resile_learner.local.launcher import LocalRun
from resile_learner.local.settings import RunSettings

HERE = Path(__file__).resolve().parent
START_SECONDS = 120.0
WARM_UP = 3  # iterations at the start of a block that do not count


@dataclass
class Training:
    """One of the trainings that are compared, and what its turns have shown: medians in seconds, one for each block."""

    name: str
    label: str
    size: int
    options: Sequence[str] = ()
    iteration: list[float] = field(default_factory=list)
    exchange: list[float] = field(default_factory=list)

    def take_turn(self, gate: Gate, iterations: int) -> None:
        by_rank = gate.turn(self.name, iterations + WARM_UP)
        self.iteration.append(statistics.median(by_rank[0]["iteration"][WARM_UP:]))
        if "exchange" in by_rank[0]:
            self.exchange.append(statistics.median(by_rank[0]["exchange"][WARM_UP:]))


def trainings(size: int) -> list[Training]:
    return [
        Training("ddp", "DDP (gloo)", size),
        Training("alone", "DDP's compute alone", size),
        Training("v=n", "Resile, V = N", size, ["--num-shards", str(size)]),
        Training("default", "Resile, default V", size),
        Training("fast", "Resile, fast mode", size, ["--mode", "fast"]),
    ]


def measure(workload: str, size: int, *, rounds: int, block_seconds: float) -> list[Training]:
    """Let the trainings take turns; the number of iterations in a block follows from the time they may take."""
    sides = trainings(size)
    with tempfile.TemporaryDirectory(prefix="resile-bench-") as folder, Gate(Path(folder) / "gate") as gate:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_ranks(workload, size, gate=gate.path))
            asyncio.run(_against(workload, sides, gate, Path(folder), rounds, block_seconds))
    return sides


async def _against(
    workload: str, sides: list[Training], gate: Gate, folder: Path, rounds: int, block_seconds: float
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for side in sides[2:]:
            await stack.enter_async_context(_resile(workload, side, gate=gate.path, home=folder / side.name))
        await asyncio.to_thread(_take_turns, sides, gate, rounds, block_seconds)


def _take_turns(sides: list[Training], gate: Gate, rounds: int, block_seconds: float) -> None:
    gate.admit({side.name: side.size for side in sides}, seconds=START_SECONDS)
    for side in sides:  # caches, allocators and lazily built things come to rest
        side.take_turn(gate, 5)
    iterations = max(5, min(100, round(block_seconds / sides[0].iteration[0])))
    for side in sides:
        side.iteration.clear()
        side.exchange.clear()
    for number in range(rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            side.take_turn(gate, iterations)


@contextlib.contextmanager
def _ranks(workload: str, size: int, *, gate: Path) -> Iterator[None]:
    """The ranks of DDP and of its compute alone, forked from a process that has imported torch as Resile's are."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed", "sides"])
    processes = [
        context.Process(target=_rank, args=(workload, name, rank, size, port, str(gate)), daemon=True)
        for name, port in (("ddp", _free_port()), ("alone", 0))
        for rank in range(size)
    ]
    try:
        for process in processes:
            process.start()
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(workload: str, name: str, rank: int, size: int, port: int, gate: str) -> None:
    from sides import train_with_ddp

    train_with_ddp(workload, name, rank=rank, size=size, port=port, gate=gate)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.asynccontextmanager
async def _resile(workload: str, side: Training, *, gate: Path, home: Path) -> AsyncIterator[None]:
    """The workers of one training of Resile, by the same launcher as `resile run`."""
    args = ("--workload", workload, "--name", side.name, "--gate", str(gate), *side.options)
    run = LocalRun(RunSettings(HERE / "sides.py", args=args, workers=side.size, home=home))
    task = asyncio.create_task(run.run(_show_output))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _show_output(event: RunEvent) -> None:
    if isinstance(event, Printed):
        print(event.line, file=sys.stderr)


def rows(sides: Sequence[Training]) -> list[Sequence[str]]:
    ddp = sides[0]
    lines = []
    for side in sides:
        ratios = [mine / theirs for mine, theirs in zip(side.iteration, ddp.iteration, strict=True)]
        total = statistics.median(side.iteration)
        exchange = statistics.median(side.exchange) if side.exchange else None
        if side is ddp:
            exchange = total - statistics.median(sides[1].iteration)
        parts = ("", "") if exchange is None else (f"{(total - exchange) * 1e3:.2f}", f"{exchange * 1e3:.2f}")
        lines.append(
            (
                side.label,
                f"{total * 1e3:.2f}",
                *parts,
                f"{statistics.median(ratios):.2f}  [{min(ratios):.2f}-{max(ratios):.2f}]",
            )
        )
    return lines


def ratio(sides: Sequence[Training], name: str) -> float:
    """The median over the rounds of a training's time by DDP's."""
    side = next(side for side in sides if side.name == name)
    return statistics.median(mine / theirs for mine, theirs in zip(side.iteration, sides[0].iteration, strict=True))


def targets(results: Mapping[tuple[str, int], Sequence[Training]]) -> Iterator[Target]:
    for (workload, size), sides in results.items():
        if size >= 2:
            yield Target(f"{workload}, {size} workers, V = N, by DDP", ratio(sides, "v=n"), 1.00)
            if workload == "gpt":
                yield Target(f"{workload}, {size} workers, default V, by DDP", ratio(sides, "default"), 1.25)


def main() -> None:
    parser = argparse.ArgumentParser(description="Iterations of Resile against those of DistributedDataParallel.")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter blocks")
    parser.add_argument("--workloads", nargs="+", default=["digits", "gpt"], choices=["digits", "gpt"])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, help="blocks of each training (default 7, quick 3)")
    args = parser.parse_args()

    results = {}
    for workload in args.workloads:
        for size in args.workers:
            sides = measure(
                workload,
                size,
                rounds=args.rounds or (3 if args.quick else 7),
                block_seconds=0.4 if args.quick else 1.0,
            )
            results[workload, size] = sides
            print_table(
                f"{workload}, {size} worker{'s' if size > 1 else ''}",
                ("training", "iteration ms", "compute ms", "exchange ms", "ratio to DDP"),
                rows(sides),
            )
    print("Compute is an iteration less its exchange: fetching, forward, backward, folding, optimizer. DDP's exchange is its")
    print("iteration less that of the same processes without DDP. Quoted (PEERS.md): torchft's steady step takes 1.29-1.65 x DDP's.")
    print_targets(targets(results))


if __name__ == "__main__":
    main()
