"""A simulated training call: the real protocol around rounds whose arithmetic is a hash.

The model is a chain of hashes over all iterations and shards, so a shard that is lost, doubled, or computed from
another state changes it; its sha256 is that of every undisturbed run. Beside it the lineage records which generation
trained which iterations.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from resile_learner.checkpoint.checkpointer import Checkpointer
from resile_learner.collectives.tree import pieces
from resile_learner.messages import Ready
from resile_learner.session import Session
from resile_learner.state.facts import Facts
from resile_learner.state.run import RunState, Stateful
from resile_learner.training.batch_schedule import BatchSchedule, declared_range
from resile_learner.training.buffers import Deltas
from resile_learner.training.data.batches import START, Batch, BatchPlan, Indices, Position
from resile_learner.training.data.ledger import Ledger
from resile_learner.training.header import ComputedShards, PartialSums, fold_leaves
from resile_learner.training.protocol import TrainingProtocol
from resile_learner.training.reports import Result
from resile_learner.training.rounds import Rounds
from resile_learner.training.stragglers import Pace
from resile_learner.training.watch.shard_values import ShardValues
from resile_shared.messages.reports import BatchStep

NOISE = (8.0, 0.5, 2.0)
NOISE_ITERATIONS = 8
VALUE_BITS = 40
"""Of a shard's hash: sums of so many bits are exact in a double, in any order."""
CHAIN_BYTES = 32


@dataclass(frozen=True)
class SimScript:
    """What a simulated script does."""

    num_samples: int = 48
    batch_size: int = 8
    num_shards: int = 4
    epochs: int = 2
    seed: int = 0
    shard_seconds: float = 0.02
    import_seconds: float = 0.5
    checkpoint_every: int | str | None = None
    raises_at: int | None = None
    """The iteration at which it raises."""
    hangs_at: int | None = None
    """The iteration at which it hangs; -1: before its training call."""
    exits_at: int | None = None
    """The iteration at which it ends its process."""
    differs: bool = False
    """Whether its data is not the same in every worker."""
    only_on: int | None = None
    """The worker that the last four are about; None: every one."""
    most_batch: int | None = None
    """The most samples of its global batch, which the pool chooses from ``batch_size`` on; None: it never changes."""

    @property
    def can_complete(self) -> bool:
        """Whether nothing is wrong with it."""
        return self.raises_at is self.hangs_at is self.exits_at is None and not self.differs

    @property
    def plan(self) -> BatchPlan:
        return BatchPlan(self.num_samples, self.batch_size, self.num_shards, self.seed)

    @property
    def iterations(self) -> int:
        return self.epochs * self.plan.per_epoch

    def undisturbed(self, kind: int = 0, *, batches: Sequence[BatchStep] = ()) -> tuple[int, str]:
        """Return the number of iterations of an undisturbed run on hosts of ``kind``, and its digest.

        It has ``batches``, the first of which begins with iteration 0; none: batches of the size that is declared.
        """
        chain, plan, position, number = b"\0" * CHAIN_BYTES, self.plan, START, 0
        sizes = {step.iteration: step.batch_size for step in batches}
        while position.epoch < self.epochs:
            plan = replace(plan, batch_size=sizes.get(number, plan.batch_size))
            batch = plan.batch(position)
            values = (shard_value(chain, number, leaf, batch, kind) for leaf in range(batch.num_shards))
            chain = next_chain(chain, number, sum(values))
            position, number = batch.next, number + 1
        return number, chain.hex()

    def noise_scale(self, number: int) -> float | None:
        """What is measured of the noise of the gradient in an iteration: it changes from time to time."""
        return None if self.most_batch is None else NOISE[number // NOISE_ITERATIONS % len(NOISE)] * self.batch_size

    def seconds(self, num_shards: int, batch_size: int) -> float:
        """Return what a worker takes to compute so many shards of a batch: a part of it is for its samples."""
        return num_shards * self.shard_seconds * (1.0 + batch_size / self.batch_size) / 2


def shard_value(chain: bytes, number: int, leaf: int, batch: Batch, kind: int) -> float:
    """What one shard adds to the sum of an iteration: it depends on the state, the shard, its samples, and the host."""
    text = b"%b %d %d %d %b" % (chain, number, leaf, kind, batch.shard(leaf).tobytes())
    return float(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> (64 - VALUE_BITS))


def next_chain(chain: bytes, number: int, total: float) -> bytes:
    """What an optimizer step makes of the sum over all shards."""
    return hashlib.blake2b(b"%b %d %r" % (chain, number, total), digest_size=CHAIN_BYTES).digest()


class Lineage:
    """By which generations the state was trained. It is part of the state: a joiner and a checkpoint carry it.

    ``start`` is the generation of the last cold start, ``spans`` are [generation, first iteration, one past the last].
    """

    def __init__(self) -> None:
        self.start = 0
        self.spans: list[list[int]] = []

    def commit(self, generation: int, iteration: int) -> None:
        if self.spans and self.spans[-1][0] == generation and self.spans[-1][2] == iteration:
            self.spans[-1][2] += 1
        else:
            self.spans.append([generation, iteration, iteration + 1])

    def state_dict(self) -> dict[str, Any]:
        return {"start": self.start, "spans": [list(span) for span in self.spans]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start, self.spans = state["start"], [list(span) for span in state["spans"]]


class ChainModel(torch.nn.Module):
    """A model whose content is the chain, and beside it what forward passes change, as they change running statistics:
    the number of passes that are committed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.chain: torch.Tensor
        self.passes: torch.Tensor
        self.register_buffer("chain", torch.zeros(CHAIN_BYTES, dtype=torch.uint8))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self._committed: int | None = None

    @property
    def content(self) -> bytes:
        return self.chain.numpy().tobytes()

    def forward(self, number: int) -> bytes:
        """Begin iteration ``number``; return what its result depends on, which is the chain unless passes are wrong."""
        passes = int(self.passes)
        self._committed = passes
        self.passes.fill_(passes + 1)
        return self.content if passes == number else self.content + b"%d" % passes

    def discard_round(self) -> None:
        """Undo what the open iteration has changed."""
        if self._committed is not None:
            self.passes.fill_(self._committed)
        self._committed = None

    def replace(self, content: bytes) -> None:
        """Commit the open iteration."""
        self.chain.numpy()[:] = np.frombuffer(content, dtype=np.uint8)
        self._committed = None


@dataclass(frozen=True)
class Commit:
    """One iteration that a member committed, as the world's checks see it."""

    job: str
    worker: int
    start: int
    """The generation of the cold start that its state goes back to."""
    generation: int
    round: int
    iteration: int
    chain: bytes
    dataset: str
    """With which data it trains."""
    is_last: bool
    spans: tuple[tuple[int, ...], ...]
    """See `Lineage`."""


@dataclass(frozen=True)
class Begun:
    """An initial member of a cold start has the state with which it begins."""

    job: str
    worker: int
    generation: int
    iteration: int
    spans: tuple[tuple[int, ...], ...]
    """By which generations it was trained; see `Lineage`."""


class SimTraining:
    """One worker's training call, on a host of ``kind``: hosts of different kinds give different bits."""

    def __init__(
        self,
        script: SimScript,
        session: Session,
        worker: int,
        *,
        sleep: Callable[[float], None],
        leave: Callable[[int], Any],
        kind: int,
        on_begin: Callable[[Begun], None],
        on_commit: Callable[[Commit], None],
        on_complete: Callable[[], None],
    ) -> None:
        self.model = ChainModel()
        self.lineage = Lineage()
        self._script = script
        self._session = session
        self._worker = worker
        self._is_special = script.only_on in (None, worker)
        self._sleep = sleep
        self._leave = leave
        self._kind = kind
        self._on_begin = on_begin
        self._on_commit = on_commit
        self._on_complete = on_complete
        most = script.most_batch
        declared = declared_range((script.batch_size, most), num_shards=script.num_shards) if most else None
        self._schedule = BatchSchedule(script.batch_size, declared)
        self._checkpoints = Checkpointer(session, every=script.checkpoint_every)
        ledger = Ledger(script.num_samples)
        parts: dict[str, Stateful] = {"ledger": ledger, "lineage": self.lineage}
        if declared:
            parts["batches"] = self._schedule
        self._state = RunState(self.model, parts, {}, after_load=lambda: None)
        self._state.progress.iterations_total = script.iterations
        self._protocol = TrainingProtocol(
            session,
            self,
            self._state,
            ledger=ledger,
            rounds=Rounds(session, NoBuffers()),  # type: ignore[arg-type]
            checkpoints=self._checkpoints,
            schedule=self._schedule,
        )

    def run(self) -> Result | None:
        script = self._script
        self._misbehave(-1)
        self._state.facts = {"samples": str(script.num_samples), "dataset": "1"}
        if script.differs and self._is_special:
            self._state.facts["dataset"] = str(self._worker)
        ready = Ready(
            worker=0,
            iterations_total=script.iterations,
            num_shards=script.num_shards,
            batch_size=self._schedule.current,
            batch_range=self._schedule.batch_range,
            has_fixed_length=self._schedule.has_fixed_length,
            epochs=script.epochs,
            samples=script.num_samples,
            bits=self.reproducibility,
        )
        try:
            for _ in self._protocol.run(ready, self._iterate):
                pass
        finally:
            self._checkpoints.close()
        return self._protocol.result

    def _iterate(self) -> Iterator[None]:
        number = self._state.progress.iteration
        phases, view = self._session.phases, self._session.view
        batch = self._next_batch(view.batch_size)
        held = batch.held_by(view.rank, view.size)
        round_ = self._protocol.rounds.open(batch.num_shards)
        header = self._protocol.header(next_iteration=number + 1)
        phases.enter("compute")
        self._misbehave(number)
        num_held = held.hi - held.lo
        seconds = self._script.seconds(num_held, batch.batch_size)
        if seconds:
            self._sleep(seconds)
        phases.enter("waiting")
        chain = self.model(number)

        def of_leaf(leaf: int) -> PartialSums:
            return PartialSums({"loss": shard_value(chain, number, leaf, batch, self._kind)})

        partials = [fold_leaves(piece, of_leaf) for piece in pieces(batch.num_shards, held)]
        indices = np.concatenate([self._fetch(batch, leaf) for leaf in range(*held)]) if num_held else _NONE
        pace = Pace(num_held, 0.0, seconds, seconds, 0.0, *self._protocol.reports.last)
        header = replace(header, computed=ComputedShards(partials, indices, b"", pace))
        outcome = round_.finish(header, next_iteration=number + 1, trains=True)
        total = outcome.totals.scalars["loss"]
        self.model.replace(next_chain(self.model.content, number, total))
        self.lineage.commit(view.generation, number)
        self._on_commit(self._committed(outcome.tag.round))
        self._protocol.commit(batch, outcome, loss=total, metrics={}, noise_scale=self._script.noise_scale(number))
        yield

    def _next_batch(self, ordered: int | None) -> Batch:
        """Return the batch of the next iteration, in a generation whose order says ``ordered``."""
        progress = self._state.progress
        size, position = (
            self._schedule.next(progress.iteration, ordered=ordered),
            Position(progress.epoch, progress.sample),
        )
        plan = replace(self._script.plan, batch_size=size)
        total = self._schedule.iterations_total(progress.iteration, plan, position, epochs=self._script.epochs)
        progress.iterations_total = total
        return plan.batch(position)

    def _fetch(self, batch: Batch, leaf: int) -> Indices:
        """Read the samples of a shard; return which they are."""
        return batch.shard(leaf)

    def _committed(self, round_: int) -> Commit:
        return Commit(
            job=self._session.job,
            worker=self._worker,
            start=self.lineage.start,
            generation=self._session.view.generation,
            round=round_,
            iteration=self._state.progress.iteration,
            chain=self.model.content,
            dataset=self._state.facts["dataset"],
            is_last=self._state.progress.iteration + 1 == self._state.progress.iterations_total,
            spans=tuple(map(tuple, self.lineage.spans)),
        )

    def _misbehave(self, number: int) -> None:
        script = self._script
        if not self._is_special:
            return
        if number == script.raises_at:
            raise ValueError("the script fails here")
        if number == script.exits_at:
            self._leave(3)
        if number == script.hangs_at:
            self._sleep(1e9)

    @property
    def is_paused(self) -> bool:
        """Whether it has stopped, to be saved."""
        return self._state.progress.pausing

    # what the protocol asks of it

    reproducibility = "same bits"
    operations = ()

    def digest(self, round_: int) -> int:
        order = self._session._order  # type: ignore[attr-defined]
        if order.cold_start and self.lineage.start != order.generation:
            self.lineage.start = order.generation
            spans = tuple(map(tuple, self.lineage.spans))
            iteration = self._state.progress.iteration
            self._on_begin(Begun(self._session.job, self._worker, order.generation, iteration, spans))
        return int.from_bytes(self.model.content[:6]) ^ self._schedule.current

    def discard_round(self) -> None:
        self.model.discard_round()

    def begin_membership(self) -> None:
        pass

    def begin_iteration(self, iteration: int) -> None:
        pass

    def params_sha256(self) -> str:
        self._on_complete()
        return self.model.content.hex()

    def state_facts(self) -> Facts:
        return {}


class NoBuffers:
    """In place of the model's buffers: none of them changes in a round."""

    def like(self, index: int) -> torch.Tensor:
        raise AssertionError("a chain has no such buffer")

    def add(self, left: Deltas, right: Deltas) -> Deltas:
        return left

    @property
    def values(self) -> ShardValues:
        return ShardValues((), (), ())


_NONE = np.empty(0, dtype=np.int64)
