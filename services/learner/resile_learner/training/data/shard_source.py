"""Where the shards of a run come from: a map-style dataset, in the order of a plan. For streams: `stream_shards`."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

from ...session import View
from ...state.facts import Facts
from ...state.run import Stateful
from .batches import Batch, BatchPlan, Position
from .fetch import Collate, Fetched, Fetcher, ShardKey
from .ledger import Ledger


class ShardSource(Protocol):
    """Cuts the batches of a run into shards, and reads those that this worker computes."""

    plan: BatchPlan
    has_known_length: bool
    """Whether the number of iterations is known before they are read."""

    @property
    def parts(self) -> dict[str, Stateful]:
        """What belongs to the state of the run."""

    def ledger(self) -> Ledger:
        """A ledger for the samples."""

    def facts_of_batch(self) -> Facts:
        """Facts of the batch that was returned last, which must be equal on all workers."""

    def resize(self, batch_size: int) -> None:
        """Let the batches from here on have ``batch_size`` samples."""

    def restart(self) -> None:
        """From now on this worker computes other shards."""

    def batch(self, position: Position, view: View) -> Batch:
        """Return the batch that begins at ``position``, the next one to be computed."""

    def next_shard(self, position: Position, turn: int, view: View) -> Fetched:
        """Read the next shard of this worker, the first one from iteration ``turn`` of the batch at ``position`` on."""

    def read_again(self, batch: Batch, rows: slice) -> Fetched:
        """Read ``rows`` of ``batch``, of any worker."""


class DatasetShards:
    """Cuts the batches of ``plan`` into shards, and reads those that this worker computes.

    ``num_turns`` is the number of iterations of each batch. In fast mode a batch has a share for each worker.
    """

    has_known_length = True

    def __init__(
        self,
        dataset: Any,
        plan: BatchPlan,
        *,
        collate_fn: Collate | None,
        num_workers: int,
        worker_init_fn: Callable[[int], object] | None,
        num_turns: int,
        is_fast: bool,
    ) -> None:
        self.plan = plan
        self._num_samples = len(dataset)
        self._fetcher = Fetcher(
            dataset, seed=plan.seed, collate_fn=collate_fn, num_workers=num_workers, worker_init_fn=worker_init_fn
        )
        self._num_turns = num_turns
        self._is_fast = is_fast
        self._stream: Iterator[Fetched] | None = None
        self._stream_epoch = 0

    def facts_of_batch(self) -> Facts:
        """Nothing to compare: the settings determine what a batch contains."""
        return {}

    def ledger(self) -> Ledger:
        """A ledger for the samples of the dataset."""
        return Ledger(self._num_samples, self.plan.order)

    @property
    def parts(self) -> dict[str, Stateful]:
        """Nothing belongs to the state of the run: the position determines what is read."""
        return {}

    def resize(self, batch_size: int) -> None:
        """Let the batches from here on have ``batch_size`` samples."""
        if batch_size != self.plan.batch_size:
            self.plan = replace(self.plan, batch_size=batch_size)
            self.restart()

    def restart(self) -> None:
        """From now on this worker computes other shards or none: what was read ahead is discarded, its readers end."""
        self._stream = None

    def batch(self, position: Position, view: View) -> Batch:
        """Return the batch that begins at ``position``."""
        return self.plan.batch(position, num_workers=view.size if self._is_fast else None)

    def next_shard(self, position: Position, turn: int, view: View) -> Fetched:
        """Read the next shard of this worker, the first one from iteration ``turn`` of the batch at ``position`` on."""
        if self._stream is None or self._stream_epoch != position.epoch:
            self._stream_epoch = position.epoch
            self._stream = self._fetcher.stream(self._upcoming(position, turn, view))
        return next(self._stream)

    def read_again(self, batch: Batch, rows: slice) -> Fetched:
        """Read ``rows`` of ``batch``, of any worker."""
        return self._fetcher.read(ShardKey(batch.epoch, batch.indices[rows]))

    def _upcoming(self, position: Position, turn: int, view: View) -> Iterator[ShardKey]:
        """This worker's shards from here to the end of the epoch; a change of membership starts a new one.

        The next epoch has readers of its own, as with a DataLoader: a script may change its dataset in between.
        """
        epoch = position.epoch
        while position.epoch == epoch:
            batch = self.batch(position, view)
            for _ in range(turn, self._num_turns):
                for leaf in range(*batch.held_by(view.rank, view.size)):
                    yield ShardKey(batch.epoch, batch.shard(leaf))
            position, turn = batch.next, 0
