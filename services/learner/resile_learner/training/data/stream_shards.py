"""Where the shards of a run come from: a stream that every worker reads, to collate its own shards."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from resile_shared.errors import UsageError

from ...session import View
from ...state.facts import Facts
from ...state.run import Stateful
from ..digest import content_digest
from ..seeds import mix, seed_all, seeded
from .batches import Batch, BatchPlan, Position, default_num_shards
from .fetch import Collate, Fetched
from .ledger import Ledger
from .stream_reader import StreamReader, StreamState


@dataclass(frozen=True)
class StreamPlan(BatchPlan):
    """The batches of a stream, whose ``num_samples`` is an estimate until an epoch has ended."""

    def batch(self, position: Position, *, num_workers: int | None = None) -> Batch:
        """Refused: how many samples the batch has is known only once it is read."""
        raise UsageError("the length of a stream is not known before it is read")


class StreamShards:
    """Reads the batches of ``stream`` in order, in place of `DatasetShards`.

    Every worker reads each sample once, and collates those of its own shards. It keeps the samples of the current
    batch, which it may compute again, with other shards, after a worker was lost. Batches never cross an epoch; as with
    a dataset, a lone leftover sample joins the batch before it, and a short batch has fewer shards. ``position()`` is
    where the next iteration begins.
    """

    has_known_length = False

    def __init__(
        self,
        stream: Any,
        *,
        batch_size: int,
        num_shards: int | None,
        seed: int,
        collate_fn: Collate | None,
        position: Callable[[], Position],
        is_fast: bool,
        micro_batch_size: int | None = None,
        keeps_lone_sample: bool = False,
    ) -> None:
        length = len(stream) if hasattr(stream, "__len__") else None
        shards = default_num_shards(batch_size) if num_shards is None else num_shards
        self.plan: BatchPlan = StreamPlan(
            length or batch_size,
            batch_size,
            shards,
            seed,
            shuffle=False,
            micro_batch_size=micro_batch_size,
            keeps_lone_sample=keeps_lone_sample,
        )
        self._name = type(stream).__name__
        self._reader = StreamReader(stream, seed=seed)
        self._collate = collate_fn or default_collate
        self._position = position
        self._is_fast = is_fast
        self._states: dict[Position, StreamState | None] = {}
        """The stream's states where the batch that was read last and the one after it begin."""
        self._first: dict[Position, str] = {}
        """Digests of the first samples of the batch that was read last and of the one after it, as far as read."""
        self._ahead: list[Any] = []
        """The samples read beyond the batch that was read last."""
        self._next: Position | None = None
        """The beginning of the batch that the reader can read without seeking, if any."""
        self._samples: list[Any] = []
        """The samples of the batch that was read last."""
        self._begin: Position | None = None
        """Where the batch that was read last begins."""
        self._end: Position
        """Where the batch after the one that was read last begins."""
        self._batch: Batch
        self._content = ""
        self._upcoming: Iterator[int] = iter(())

    def facts_of_batch(self) -> Facts:
        """The facts of the batch that must be equal on all workers: its extent, and the content of its first sample."""
        return {"stream": f"{len(self._samples)} {self._end.sample} {self._content}"}

    def resize(self, batch_size: int) -> None:
        """Nothing to do: a stream has batches of one size."""

    def ledger(self) -> Ledger:
        """A ledger for the samples of the stream, by their numbers in the epoch."""
        return Ledger()

    @property
    def parts(self) -> dict[str, Stateful]:
        """What belongs to the state of the run."""
        return {"stream": self}

    def restart(self) -> None:
        """Nothing to do: all samples of the batch under way are kept."""

    def batch(self, position: Position, view: View) -> Batch:
        """Read the batch that begins at ``position``, unless it was read already."""
        if self._begin != position:
            with seeded(mix(self.plan.seed, "stream")):
                self._read_batch(position)
            self._begin = position
        self._batch = self._cut(position, view)
        self._upcoming = iter(range(*self._batch.held_by(view.rank, view.size)))
        return self._batch

    def next_shard(self, position: Position, turn: int, view: View) -> Fetched:
        """Return the next shard of this worker."""
        return self.read_again(self._batch, self._batch.rows(next(self._upcoming)))

    def read_again(self, batch: Batch, rows: slice) -> Fetched:
        """Collate ``rows`` of ``batch``, of any worker."""
        indices = batch.indices[rows]
        samples = copy.deepcopy([self._samples[index - batch.indices[0]] for index in indices])
        seed_all(mix(self.plan.seed, "collate", batch.epoch, int(indices[0])))
        return Fetched(indices, self._collate(samples))

    def _read_batch(self, position: Position) -> None:
        self._samples = []  # not kept while others are read
        if self._next != position:
            self._seek(position)
        size, samples = self.plan.batch_size, self._ahead
        margin = 1 if self.plan.keeps_lone_sample else min(2, size)
        self._fill(samples, size)
        state = self._reader.state()
        self._fill(samples, size + margin)
        if not samples:
            raise UsageError(
                f"the stream ({self._name}) has no samples in epoch {position.epoch}: let __iter__ start over for each "
                "epoch"
            )
        if len(samples) < size + margin:
            self._end = Position(position.epoch + 1)
            known = position.sample + len(samples)
        else:
            self._end = Position(position.epoch, position.sample + size)
            samples, self._ahead = samples[:size], samples[size:]
            known = max(self.plan.num_samples, self._end.sample + margin)
        self.plan = replace(self.plan, num_samples=known)
        following = state if self._end.sample else self._reader.state()
        self._states = {position: self._states.get(position), self._end: following}
        self._next = self._end if self._end.sample else None
        self._samples = samples
        self._content = content_digest(samples[0])[:16]
        self._reader.check_same(position.sample, self._first.get(position, self._content), self._content)
        self._first = {position: self._content}
        if self._end.sample:
            self._first[self._end] = content_digest(self._ahead[0])[:16]

    def _cut(self, position: Position, view: View) -> Batch:
        length = len(self._samples)
        indices = np.arange(position.sample, position.sample + length, dtype=np.int64)
        return self.plan.cut(position.epoch, indices, self._end, num_workers=view.size if self._is_fast else None)

    def _seek(self, position: Position) -> None:
        self._ahead = []
        self._reader.open(position.epoch, position.sample, self._states.get(position))

    def _fill(self, samples: list[Any], length: int) -> None:
        while len(samples) < length:
            try:
                samples.append(self._reader.read())
            except StopIteration:
                return

    def state_dict(self) -> dict[str, Any]:
        """Where the next iteration begins, the stream's state there, and what the epoch began with."""
        position = self._position()
        return {
            "position": list(position),
            "state": self._states.get(position),
            "samples": self.plan.num_samples,
            "first": self._first.get(position),
            "read_before": self._reader.read_before,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned elsewhere. What this worker has read itself, it does not read again."""
        position = Position(*state["position"])
        self._states = {position: state["state"]}
        self._first = {} if state["first"] is None else {position: state["first"]}
        self._reader.read_before = state["read_before"]
        self.plan = replace(self.plan, num_samples=state["samples"])
