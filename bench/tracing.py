"""What tracing costs a training iteration, while nothing changes and when a change comes every 20 iterations.

    python bench/tracing.py [--quick | --tiny]

One process trains a small MLP, whose iterations are as short as any: what is added to each weighs most there. Blocks
of iterations take turns within the run: without a recorder, with the one that every worker has, and with a change
before each block, of which the worker makes the message to its agent as well. A ratio is the median over all turns of
the median iteration of a block to that of the block without a recorder in the same turn.
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
from resile_learner.messages import Message, encode
from resile_learner.session import SoloSession, enter_session

BLOCK = 20
WARM_UP = 3
"""Iterations at the start of a block that do not count; those that a change records are among them, or come next."""
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
    direct = recorded_alone(length.pick(full=200_000, quick=50_000, tiny=2000))
    rows = []
    ratios = {}
    for kind in KINDS:
        blocks = times[kind]
        ratios[kind] = statistics.median(block / plain for block, plain in zip(blocks, times["none"], strict=True))
        rows.append((kind, f"{1e3 * statistics.median(blocks):.3f}", f"{ratios[kind]:.4f}"))
    print_table("An iteration of a small MLP", ("recorder", "ms", "ratio"), rows)
    share = direct / statistics.median(times["none"])
    print(f"\nThe recorder alone: {1e6 * direct:.2f} us an iteration, {100 * share:.3f} % of it")
    conclude(
        [
            Target("ratio while nothing changes", ratios["steady"], MOST_RATIO),
            Target("ratio with a change every 20 iterations", ratios["changing"], MOST_RATIO),
            Target("percent that the recorder takes by itself", 100 * share, 1.0),
        ],
        length,
    )


def trained(turns: int) -> dict[str, list[float]]:
    """Return the median iteration of each block, in seconds, by kind of recorder; turn after turn."""
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
    taken: list[float] = []
    kind = next(blocks)
    dataset = TensorDataset(inputs, targets)
    begun = time.perf_counter()
    for iteration in ElasticLoop(model, optimizer, dataset, epochs=epochs, batch_size=192, num_shards=8):
        for batch, labels in iteration.shards():
            iteration.backward(nn.functional.cross_entropy(model(batch), labels))
        if iteration.exchange():
            optimizer.step()
        now = time.perf_counter()
        taken.append(now - begun)
        begun = now
        if len(taken) == BLOCK:
            times[kind].append(statistics.median(taken[WARM_UP:]))
            taken = []
            try:
                kind = next(blocks)
            except StopIteration:
                break
            session.changes = nothing if kind == "none" else recorder
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
            begun = time.perf_counter()
        recorder.on_begin(iteration)
        with recorder.step("exchange", round=iteration):
            pass
        recorder.on_commit(iteration, lambda spans, is_sample: None)
    return (time.perf_counter() - begun) / (num - num // 10)


if __name__ == "__main__":
    main()
