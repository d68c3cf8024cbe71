"""Steady state: an iteration of Resile against one of DistributedDataParallel on gloo, in one run.

    python bench/steady.py [--quick | --tiny] [--workloads digits gpt mlp] [--workers 1 2 4]

For each model and number of workers eight trainings live side by side and take turns of a few iterations each: DDP, the
same processes without DDP (compute alone), and Resile with V = N (the cut that DDP makes), with the V that the training
call takes by itself (8 for the digits' batch of 192, and the MLP's of 96, 4 for the GPT's of 32), the same with a range
of batches, so that the noise scale is measured, with V = 8, in fast mode, and with the default V and a body that runs
once for each batch. A ratio is that of the median iterations;
the quartiles are of the ratios of single turns. The second ratio is that of processor time, of all workers together: it
shows work, not waiting, and is steadier on a busy machine.
"""

import asyncio
import contextlib
import multiprocessing
import socket
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from gate import Gate
from report import Target, argument_parser, conclude, print_table

from resile.local.events import Printed, RunEvent
from resile.local.result import Result
from resile.local.run import LocalRun
from resile.local.settings import RunSettings

HERE = Path(__file__).resolve().parent
START_SECONDS = 120.0
TURN_SECONDS = 0.2
WORKLOADS = ("digits", "gpt", "mlp")
DEFAULT_RATIOS = {"digits": 1.25, "gpt": 1.10}
"""What an iteration with the default V takes at most, by DDP's."""
WARM_UP = 2  # iterations at the start of a block that do not count


@dataclass
class Training:
    """One of the trainings that are compared, and what its turns have shown, in seconds."""

    name: str
    label: str
    size: int
    options: Sequence[str] = ()
    iterations: list[float] = field(default_factory=list)
    exchanges: list[float] = field(default_factory=list)
    by_turn: list[float] = field(default_factory=list)
    """The median iteration of each turn."""
    processor: list[float] = field(default_factory=list)
    """Of each turn: processor time of all workers together, for one iteration."""

    def take_turn(self, gate: Gate, iterations: int) -> None:
        by_rank = gate.turn(self.name, iterations + WARM_UP)
        counted = by_rank[0]["iteration"][WARM_UP:]
        self.iterations += counted
        self.exchanges += by_rank[0].get("exchange", [])[WARM_UP:]
        self.by_turn.append(statistics.median(counted))
        self.processor.append(sum(worker["cpu"][0] for worker in by_rank) / (iterations + WARM_UP))

    def forget(self) -> None:
        for measured in (self.iterations, self.exchanges, self.by_turn, self.processor):
            measured.clear()


def trainings(size: int) -> list[Training]:
    return [
        Training("ddp", "DDP (gloo)", size),
        Training("alone", "DDP's compute alone", size),
        Training("v=n", "Resile, V = N", size, ["--num-shards", str(size)]),
        Training("default", "Resile, default V", size),
        Training("noise", "Resile, default V, noise scale", size, ["--measures-noise"]),
        Training("v=8", "Resile, V = 8", size, ["--num-shards", "8"]),
        Training("fast", "Resile, fast mode", size, ["--mode", "fast"]),
        Training("batch", "Resile, a body for each batch", size, ["--body", "batch"]),
    ]


def measure(workload: str, size: int, *, rounds: int) -> list[Training]:
    """Let the trainings take turns."""
    sides = trainings(size)
    with tempfile.TemporaryDirectory(prefix="resile-bench-") as folder, Gate(Path(folder) / "gate") as gate:
        asyncio.run(_side_by_side(workload, sides, gate=gate, home=Path(folder), rounds=rounds))
    return sides


async def _side_by_side(workload: str, sides: Sequence[Training], *, gate: Gate, home: Path, rounds: int) -> None:
    async with contextlib.AsyncExitStack() as stack:
        ranks = stack.enter_context(_ranks(workload, sides[0].size, gate=gate.path))
        runs = [
            await stack.enter_async_context(_resile(workload, side, gate=gate.path, home=home / side.name))
            for side in sides[2:]
        ]

        def broken() -> bool:
            return any(not rank.is_alive() for rank in ranks) or any(run.done() for run in runs)

        await asyncio.to_thread(_take_turns, sides, gate, rounds, broken)


def _take_turns(sides: Sequence[Training], gate: Gate, rounds: int, broken: Callable[[], bool]) -> None:
    gate.admit({side.name: side.size for side in sides}, seconds=START_SECONDS, broken=broken)
    for side in sides:  # caches, allocators and lazily built things come to rest
        side.take_turn(gate, 5)
    iterations = max(3, min(50, round(TURN_SECONDS / sides[0].by_turn[0])))
    for side in sides:
        side.forget()
    for number in range(rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            side.take_turn(gate, iterations)


@contextlib.contextmanager
def _ranks(workload: str, size: int, *, gate: Path) -> Iterator[Sequence[BaseProcess]]:
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
        yield processes
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
async def _resile(workload: str, side: Training, *, gate: Path, home: Path) -> AsyncIterator[asyncio.Task[Result]]:
    """The workers of one training of Resile, by the same launcher as `resile run`."""
    args = ("--workload", workload, "--name", side.name, "--gate", str(gate), *side.options)
    run = LocalRun(RunSettings(HERE / "sides.py", args=args, workers=side.size, home=home))
    task = asyncio.create_task(run.run(_show_output))
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            result = await task
            print(result.outcome.error, result.outcome.details, file=sys.stderr)


def _show_output(event: RunEvent) -> None:
    if isinstance(event, Printed):
        print(event.line, file=sys.stderr)


def rows(sides: Sequence[Training]) -> list[Sequence[str]]:
    ddp, alone = sides[:2]
    lines = []
    for side in sides:
        iteration = statistics.median(side.iterations)
        exchange = statistics.median(side.exchanges) if side.exchanges else 0.0
        if side is ddp:
            exchange = iteration - statistics.median(alone.iterations)
        by_turn = sorted(mine / theirs for mine, theirs in zip(side.by_turn, ddp.by_turn, strict=True))
        quarter = len(by_turn) // 4
        lines.append(
            (
                side.label,
                f"{iteration * 1e3:.2f}",
                f"{(iteration - exchange) * 1e3:.2f}",
                f"{exchange * 1e3:.2f}",
                f"{statistics.median(side.processor) * 1e3:.2f}",
                f"{ratio(side, ddp):.2f}  [{by_turn[quarter]:.2f}-{by_turn[-1 - quarter]:.2f}]",
                f"{statistics.median(side.processor) / statistics.median(ddp.processor):.2f}",
            )
        )
    return lines


def ratio(side: Training, ddp: Training) -> float:
    """A training's median iteration by DDP's."""
    return statistics.median(side.iterations) / statistics.median(ddp.iterations)


def targets(results: Mapping[tuple[str, int], Sequence[Training]]) -> Iterator[Target]:
    for (workload, size), sides in results.items():
        by_name = {side.name: side for side in sides}
        once = ratio(by_name["batch"], by_name["default"])
        yield Target(f"{workload}, {size} workers, a body for each batch, by one for each shard", once, 1.05)
        if size >= 2:
            yield Target(f"{workload}, {size} workers, V = N, by DDP", ratio(by_name["v=n"], sides[0]), 0.95)
            if workload in DEFAULT_RATIOS:
                most = DEFAULT_RATIOS[workload]
                yield Target(
                    f"{workload}, {size} workers, default V, by DDP", ratio(by_name["default"], sides[0]), most
                )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, help="(all)")
    parser.add_argument("--workers", nargs="+", type=int, help="numbers of workers (1 2 4)")
    parser.add_argument("--rounds", type=int, help="turns of each training (40, quick 12)")
    args = parser.parse_args()
    length = args.length
    rounds = args.rounds or length.pick(full=40, quick=12, tiny=1)

    results = {}
    for workload in args.workloads or length.pick(full=WORKLOADS, quick=WORKLOADS, tiny=("digits",)):
        for size in args.workers or length.pick(full=(1, 2, 4), quick=(1, 2, 4), tiny=(1,)):
            sides = results[workload, size] = measure(workload, size, rounds=rounds)
            print_table(
                f"{workload}, {size} worker{'s' if size > 1 else ''}",
                (
                    "training",
                    "iteration ms",
                    "compute",
                    "exchange",
                    "processor",
                    "ratio to DDP  [quartiles]",
                    "processor",
                ),
                rows(sides),
            )
    print(
        "Compute is an iteration less its exchange: fetching, forward, backward, folding, optimizer.\n"
        "DDP's exchange is its iteration less that of the same processes without it.\n"
        "Quoted: torchft's steady step takes 1.29 to 1.65 times that of DDP."
    )
    conclude(targets(results), length)


if __name__ == "__main__":
    main()
