"""Changes of membership: what a planned shrink (4 to 3 workers) and a planned grow (3 to 4) cost.

    python bench/rescale.py [--quick | --tiny] [--millions 1 100] [--body shard|batch]

A real run (the launcher of `resile run`) is resized again and again while it trains an MLP with AdamW. The lowest rank
notes when each iteration is committed, on the clock of the bench.

- pause: the time between the two iterations around the change, less the new membership's median iteration.
- order to effect: from the call of `resize` to the start of the first iteration of the new membership.
- body: what a run of the loop's body is for, each shard, or each batch as in an ordinary loop.
- lost: from the call until 20 iterations after the change, less what these iterations take at the steady rates before
  and after. It holds the pause, and what the joiner's start takes from the others' processors.
"""

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bandwidth import loopback_bytes_per_second
from report import Target, argument_parser, conclude, print_table
from stamps import Stamps

from resile.local.events import Printed, Rescaled, RunEvent
from resile.local.run import LocalRun
from resile.local.settings import RunSettings

HERE = Path(__file__).resolve().parent
LARGE, SMALL = 4, 3
NUM_SHARDS = 12  # both sizes share them evenly
STATE_BYTES_PER_PARAMETER = 12  # itself and AdamW's two moments
POLL_SECONDS = 0.02
PATIENCE_SECONDS = 300.0

PEERS = (
    ("torchrun elastic, tuned", "11.1 s", "9.6 s"),
    ("torchft nightly, 1 s / 1 s", "1.04 s", "0.13 s"),
    ("Ray Train 2.60 elastic", "-", "17.8 s"),
)


@dataclass(frozen=True)
class Scale:
    """How one model is measured."""

    millions: int
    batch_size: int
    changes: int
    """Of each kind."""
    steady: int
    """Iterations before and after a change that give the steady rate."""
    after: int
    """Iterations after a change that count as disturbed by it."""
    body: str
    """What the body of the training loop runs for: each "shard", or each "batch"."""


@dataclass(frozen=True)
class Change:
    """One change, in seconds."""

    grows: bool
    pause: float
    effect: float
    lost: float
    iteration_before: float
    """The old membership's median."""


class Disturbed:
    """A run under way, with what it has noted."""

    def __init__(self, scale: Scale, folder: Path) -> None:
        self._scale = scale
        self._stamps = Stamps(folder / "stamps")
        args = (
            "--millions",
            scale.millions,
            "--batch-size",
            scale.batch_size,
            "--num-shards",
            NUM_SHARDS,
            "--body",
            scale.body,
        )
        script_args = (*map(str, args), "--stamps", str(self._stamps.path))
        settings = RunSettings(HERE / "rescaled.py", args=script_args, workers=LARGE, home=folder / "home")
        self._run = LocalRun(settings)
        self._rescaled: asyncio.Queue[Rescaled] = asyncio.Queue()

    async def changes(self) -> list[Change]:
        """Resize back and forth, and measure."""
        task = asyncio.create_task(self._run.run(self._heard))
        resizing = asyncio.create_task(self._resize_all())
        try:
            await asyncio.wait([task, resizing], return_when=asyncio.FIRST_COMPLETED)
            if not resizing.done():
                raise RuntimeError(f"the run ended by itself: {task.result().outcome}")
            orders, switches = resizing.result()
        finally:
            for unfinished in (resizing, task):
                unfinished.cancel()
                with contextlib.suppress(asyncio.CancelledError, RuntimeError):
                    await unfinished
        stamps = self._read()
        return [self._measured(stamps, order, switch) for order, switch in zip(orders, switches, strict=True)]

    async def _resize_all(self) -> tuple[list[float], list[Rescaled]]:
        scale = self._scale
        begun = await self._switch()
        await self._committed(begun.iteration + scale.after + scale.steady)
        orders, switches = [], []
        for size in [SMALL, LARGE] * scale.changes:
            orders.append(time.monotonic())
            self._run.resize(size)
            switches.append(await self._switch())
            await self._committed(switches[-1].iteration + scale.after + scale.steady)
        return orders, switches

    async def _switch(self) -> Rescaled:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self._rescaled.get()

    async def _committed(self, iteration: int) -> None:
        """Wait until so many iterations are committed."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(self._read()) <= iteration:  # noqa: ASYNC110 - another process writes
                await asyncio.sleep(POLL_SECONDS)

    def _heard(self, event: RunEvent) -> None:
        if isinstance(event, Rescaled):
            self._rescaled.put_nowait(event)
        elif isinstance(event, Printed):
            print(event.line, file=sys.stderr)

    def _read(self) -> list[float]:
        return [stamp.time for stamp in self._stamps.read()]

    def _measured(self, stamps: Sequence[float], order: float, switch: Rescaled) -> Change:
        steady, after = self._scale.steady, self._scale.after
        first = switch.iteration  # of the new membership
        last_before = next(number for number, stamp in enumerate(stamps) if stamp > order) - 1  # when it was ordered
        before = [b - a for a, b in pairwise(stamps[last_before - steady : last_before + 1])]
        settled = range(first + after, first + after + steady)
        new = [stamps[number] - stamps[number - 1] for number in settled]
        pause = stamps[first] - stamps[first - 1] - statistics.median(new)
        disturbed = stamps[first + after - 1] - stamps[last_before]
        usual = (first - 1 - last_before) * statistics.mean(before) + after * statistics.mean(new)
        return Change(
            grows=switch.after > switch.before,
            pause=pause,
            effect=stamps[first - 1] + pause - order,
            lost=disturbed - usual,
            iteration_before=statistics.median(before),
        )


def measure(scale: Scale) -> tuple[list[Change], float]:
    """The changes of one model, and the bandwidth of a link in bytes per second."""
    with tempfile.TemporaryDirectory(prefix="resile-bench-") as folder:
        bandwidths = [loopback_bytes_per_second() for _ in range(3)]
        changes = asyncio.run(Disturbed(scale, Path(folder)).changes())
        bandwidths += [loopback_bytes_per_second() for _ in range(3)]
    return changes, statistics.median(bandwidths)


def row(label: str, changes: Sequence[Change], after: int) -> Sequence[str]:
    def spread(values: list[float]) -> str:
        return f"{statistics.median(values) * 1e3:.1f} [{min(values) * 1e3:.1f} to {max(values) * 1e3:.1f}]"

    return (
        label,
        str(len(changes)),
        f"{statistics.median(change.iteration_before for change in changes) * 1e3:.1f}",
        spread([change.pause for change in changes]),
        spread([change.effect for change in changes]),
        spread([change.lost for change in changes]),
    )


def targets(scale: Scale, changes: Sequence[Change], bandwidth: float) -> Iterator[Target]:
    shrinks, grows = [c for c in changes if not c.grows], [c for c in changes if c.grows]

    def median_ms(values: Iterator[float]) -> float:
        return statistics.median(values) * 1e3

    name = f"{scale.millions} M" if scale.body == "shard" else f"{scale.millions} M, a body for each batch"
    grow_pause = median_ms(c.pause for c in grows)
    if scale.millions == 1:
        yield Target(f"{name}, pause of a shrink", median_ms(c.pause for c in shrinks), 10, "ms")
        yield Target(f"{name}, pause of a grow", grow_pause, 50, "ms")
        late = median_ms(c.effect - c.iteration_before for c in shrinks)
        yield Target(f"{name}, order to effect of a shrink less one iteration", late, 100, "ms")
        late = median_ms(c.effect - c.iteration_before for c in grows)
        yield Target(f"{name}, order to effect of a grow less one iteration", late, 1000, "ms")
    else:
        limit = 1.2 * scale.millions * 1e6 * STATE_BYTES_PER_PARAMETER / bandwidth * 1e3
        yield Target(f"{name}, pause of a grow, by 1.2 x state / bandwidth", grow_pause, limit, "ms")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--millions", nargs="+", type=int, choices=[1, 100], help="parameters (1 100)")
    parser.add_argument("--body", choices=["shard", "batch"], default="shard")
    parser.add_argument("--changes", type=int, help="of each kind")
    args = parser.parse_args()
    length = args.length

    verdicts: list[Target] = []
    for millions in args.millions or length.pick(full=(1, 100), quick=(1, 100), tiny=(1,)):
        if millions == 1:
            changes, steady, after = length.pick(full=(12, 40, 20), quick=(5, 40, 20), tiny=(1, 3, 3))
            scale = Scale(1, 96, args.changes or changes, steady, after, args.body)
        else:
            changes, steady, after = length.pick(full=(3, 5, 20), quick=(1, 3, 3), tiny=(1, 3, 3))
            scale = Scale(100, 12, args.changes or changes, steady, after, args.body)
        measured, bandwidth = measure(scale)
        header = (
            "",
            "changes",
            "iteration before",
            "pause ms",
            "order to effect ms",
            f"lost in {scale.after} iterations ms",
        )
        shrinks, grows = [c for c in measured if not c.grows], [c for c in measured if c.grows]
        print_table(
            f"{millions} M parameters, AdamW, a body for each {scale.body}; sockets carry {bandwidth / 1e9:.2f} GB/s",
            header,
            [
                row(f"shrink {LARGE} to {SMALL}", shrinks, scale.after),
                row(f"grow {SMALL} to {LARGE}", grows, scale.after),
            ],
        )
        verdicts += targets(scale, measured, bandwidth)
    print_table(
        "Quoted (README), not measured here: time without a committed step (0.99 M parameters, AdamW, 4 workers)",
        ("", "one worker leaves, announced", "one more worker"),
        PEERS,
    )
    conclude(verdicts, length)


if __name__ == "__main__":
    main()
