"""What tracing costs a training iteration, while nothing changes and when a change comes every 20 iterations.

    python bench/tracing.py [--quick | --tiny]

One process trains a small MLP, whose iterations are very short, so that a cost per iteration weighs most. Blocks of
iterations take turns within the run: without a recorder, with the one that every worker has, and with a change before
each block, for which the worker also builds the messages to its agent. The bench measures the processor time of the
training thread, which other processes disturb less than wall-clock time. A ratio is the median, over all turns, of a
block to the block without a recorder in the same turn.

The recorder is also timed by itself, for an iteration while nothing changes and for a whole change: these costs are
free of the noise of training.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from report import Length, Target, argument_parser, conclude, print_table
from torch import nn
from torch.utils.data import TensorDataset

from resile.training import ElasticLoop
from resile_learner.changes import ChangeRecorder, Value
from resile_learner.messages import ChangeTraced, Message, WorkerSpan, encode
from resile_learner.session import SoloSession, enter_session

BLOCK = 20
MOST_RATIO = 1.01
KINDS = ("none", "steady", "changing")


class NoRecorder(ChangeRecorder):
    """Records nothing."""

    def on_begin(self, iteration: int) -> None:
        """Do nothing."""

    def on_commit(self, iteration: int, send: object) -> None:
        """Do nothing."""

    def step(self, name: str, **attributes: Value) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()


class BenchSession(SoloSession):
    """A plain run that makes the messages to an agent, as a worker does."""

    def report(self, message: Message) -> None:
        """Make the line of the socket."""
        encode(message)


def main() -> None:
    """Run the bench."""
    length: Length = argument_parser(__doc__).parse_args().length
    turns = length.pick(full=100, quick=12, tiny=2)
    times = trained(turns)
    num = length.pick(full=20_000, quick=5000, tiny=200)
    plain = statistics.median(times["none"])
    alone = {"steady": recorded_alone(10 * num), "changing": change_alone(num)}
    rows = []
    ratios = {}
    for kind in KINDS:
        blocks = times[kind]
        ratios[kind] = statistics.median(block / plain for block, plain in zip(blocks, times["none"], strict=True))
        own = alone.get(kind, 0.0)
        milliseconds, added = f"{1e3 * statistics.median(blocks):.3f}", f"{1e6 * own:.2f}"
        rows.append((kind, milliseconds, f"{ratios[kind]:.4f}", added, f"{100 * own / plain:.3f}"))
    heads = ("recorder", "ms", "ratio", "alone, us", "alone, %")
    print_table("Processor time of an iteration of a small MLP", heads, rows)
    conclude(
        [
            Target("ratio while nothing changes", ratios["steady"], MOST_RATIO),
            Target("ratio with a change every 20 iterations", ratios["changing"], MOST_RATIO),
            Target(
                "percent that the recorder takes by itself while nothing changes", 100 * alone["steady"] / plain, 1.0
            ),
            Target("percent that it takes with a change every 20 iterations", 100 * alone["changing"] / plain, 1.0),
        ],
        length,
    )


def trained(turns: int) -> dict[str, list[float]]:
    """Return the mean iteration of each block, in seconds, by kind of recorder; turn after turn."""
    torch.set_num_threads(1)
    session = BenchSession()
    enter_session(session)
    recorder, nothing = session.changes, NoRecorder()
    torch.manual_seed(0)
    inputs, targets = torch.randn(1920, 64), torch.randint(10, (1920,))
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    blocks = _order(turns)
    epochs = (turns + 1) * len(KINDS) * BLOCK // 10 + 1
    num_taken = 0
    kind = next(blocks)
    dataset = TensorDataset(inputs, targets)
    begun = time.thread_time()
    for iteration in ElasticLoop(model, optimizer, dataset, epochs=epochs, batch_size=192, num_shards=8):
        for batch, labels in iteration.shards():
            iteration.backward(nn.functional.cross_entropy(model(batch), labels))
        if iteration.exchange():
            optimizer.step()
        num_taken += 1
        if num_taken == BLOCK:
            times[kind].append((time.thread_time() - begun) / BLOCK)
            num_taken = 0
            try:
                kind = next(blocks)
            except StopIteration:
                break
            session.changes = nothing if kind == "none" else recorder
            begun = time.thread_time()
            if kind == "changing":
                recorder.begin()
    return times


def _order(turns: int) -> Iterator[str]:
    """Yield the kinds of the blocks: in each turn another one comes first."""
    for turn in range(turns):
        first = turn % len(KINDS)
        yield from KINDS[first:] + KINDS[:first]


def recorded_alone(num: int) -> float:
    """Return the seconds that the recorder takes in one iteration while nothing changes."""
    recorder = ChangeRecorder()
    begun = 0.0
    for iteration in range(num):
        if iteration == num // 10:
            begun = time.thread_time()
        _iterate(recorder, iteration)
    return (time.thread_time() - begun) / (num - num // 10)


def change_alone(num: int) -> float:
    """Return the seconds that the recorder takes in an iteration on average, with a change every `BLOCK` iterations."""
    recorder = ChangeRecorder()
    begun = time.thread_time()
    for iteration in range(num * BLOCK):
        if iteration % BLOCK == 0:
            recorder.begin()
        _iterate(recorder, iteration)
    return (time.thread_time() - begun) / (num * BLOCK)


def _iterate(recorder: ChangeRecorder, iteration: int) -> None:
    recorder.on_begin(iteration)
    with recorder.step("exchange", round=iteration):
        pass
    recorder.on_commit(iteration, _report)


def _report(spans: tuple[WorkerSpan, ...], is_sample: bool) -> None:
    encode(ChangeTraced(worker=0, generation=1, change="none" if is_sample else "generation", spans=spans))


if __name__ == "__main__":
    main()
