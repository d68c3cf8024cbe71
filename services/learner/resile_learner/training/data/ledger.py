"""The ledger: how often each sample was used, counted from the indices that committed iterations really fetched.

It is part of every checkpoint and of the result, so it has at most `MAX_CLOSED` entries besides that of the epoch under
way: when there are more, epochs that follow each other share an entry with their sums.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import numpy as np

from resile_shared.messages.reports import EpochCount

from .batches import Indices

MAX_CLOSED = 1000


class UseCounts(NamedTuple):
    """How many samples an epoch has, how many were used once and how many never, and whether as a sampler drew them."""

    samples: int
    once: int
    never: int
    as_drawn: bool | None = None


class Uses(Protocol):
    """How often each sample of one epoch was used."""

    def add(self, indices: Indices) -> None:
        """Count one use for each of ``indices``."""

    def counts(self) -> UseCounts:
        """Sum up all samples."""

    def as_state(self) -> Any:
        """Return the uses as plain values; `load` takes them over."""

    def load(self, state: Any) -> None:
        """Take over what `as_state` returned."""


class DatasetUses:
    """The uses of ``num_samples`` samples in any order: one number for each. See `Ledger` for ``drawn``."""

    def __init__(self, num_samples: int, drawn: Callable[[], Indices] | None) -> None:
        self._uses = np.zeros(num_samples, dtype=np.uint32)
        self._drawn = drawn

    def add(self, indices: Indices) -> None:
        """Count one use for each of ``indices``."""
        np.add.at(self._uses, indices, 1)

    def counts(self) -> UseCounts:
        """Sum up all samples."""
        once, never = np.count_nonzero(self._uses == 1), np.count_nonzero(self._uses == 0)
        return UseCounts(
            len(self._uses), int(once), int(never), self._is_as_drawn(self._drawn) if self._drawn else None
        )

    def _is_as_drawn(self, drawn: Callable[[], Indices]) -> bool:
        """Whether the samples used so far are the first of the epoch that a sampler drew."""
        first = drawn()[: int(self._uses.sum())]
        return np.array_equal(self._uses, np.bincount(first, minlength=len(self._uses)))

    def as_state(self) -> Any:
        """An array of shape (num_samples,) and dtype uint32."""
        return self._uses

    def load(self, state: Any) -> None:
        """Take over what `as_state` returned."""
        self._uses = np.array(state, dtype=np.uint32)


class StreamUses:
    """The uses of the samples of a stream, whose number follows from the highest index.

    Samples come in order, each once, so only the exceptions have a number of their own: neither the memory nor the time
    of a batch grows with the epoch.
    """

    def __init__(self) -> None:
        self._num_samples = 0
        self._others: dict[int, int] = {}
        """The uses of each sample that was not used exactly once."""

    def add(self, indices: Indices) -> None:
        """Count one use for each of ``indices``."""
        begin = self._num_samples
        uses = np.bincount(indices[indices >= begin] - begin)
        self._num_samples += len(uses)
        for offset in np.flatnonzero(uses != 1).tolist():
            self._others[begin + offset] = int(uses[offset])
        for index in indices[indices < begin].tolist():
            uses_before = self._others.pop(index, 1)
            if uses_before:
                self._others[index] = uses_before + 1

    def counts(self) -> UseCounts:
        """Sum up all samples."""
        never = sum(uses == 0 for uses in self._others.values())
        return UseCounts(self._num_samples, self._num_samples - len(self._others), never)

    def as_state(self) -> Any:
        """The number of samples, and the uses of each that was not used exactly once."""
        return self._num_samples, self._others

    def load(self, state: Any) -> None:
        """Take over what `as_state` returned."""
        self._num_samples, others = state
        self._others = dict(others)


class Ledger:
    """Counts uses of samples, epoch by epoch. ``drawn`` returns the indices that a sampler draws in an epoch.

    Without ``num_samples`` the samples are those of a stream: see `StreamUses`.
    """

    def __init__(self, num_samples: int | None = None, drawn: Callable[[int], Indices] | None = None) -> None:
        self._num_samples = num_samples
        self._drawn = drawn
        self._closed: list[EpochCount] = []
        self._epoch = 0
        self._uses = self._unused()
        self.samples_seen = 0

    def commit(self, epoch: int, indices: Indices) -> None:
        """Count the ``indices`` that one committed iteration of ``epoch`` used."""
        if epoch != self._epoch:
            self._closed.append(self._count())
            if len(self._closed) > MAX_CLOSED:
                self._closed = _coalesced(self._closed)
            self._epoch = epoch
            self._uses = self._unused()
        self._uses.add(indices)
        self.samples_seen += len(indices)

    def epochs(self) -> tuple[EpochCount, ...]:
        """The counts of all epochs started, those of the current one so far."""
        return (*self._closed, self._count()) if self.samples_seen else ()

    def _count(self) -> EpochCount:
        samples, once, never, as_drawn = self._uses.counts()
        return EpochCount(
            epoch=self._epoch,
            samples=samples,
            once=once,
            more=samples - once - never,
            never=never,
            as_drawn=as_drawn,
        )

    def _unused(self) -> Uses:
        if self._num_samples is None:
            return StreamUses()
        return DatasetUses(self._num_samples, partial(self._drawn, self._epoch) if self._drawn else None)

    def state_dict(self) -> dict[str, Any]:
        """The ledger as plain values."""
        return {
            "closed": [count.model_dump() for count in self._closed],
            "epoch": self._epoch,
            "uses": self._uses.as_state(),
            "samples_seen": self.samples_seen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned elsewhere."""
        self._closed = [EpochCount(**count) for count in state["closed"]]
        self._epoch = state["epoch"]
        self._uses = self._unused()
        self._uses.load(state["uses"])
        self.samples_seen = state["samples_seen"]


def _coalesced(counts: Sequence[EpochCount]) -> list[EpochCount]:
    """Sum up neighbours in which each sample was used once; if that leaves too many, all neighbours two by two."""
    merged: list[EpochCount] = []
    for count in counts:
        if merged and _is_complete(merged[-1]) and _is_complete(count):
            merged[-1] = _sum(merged[-1], count)
        else:
            merged.append(count)
    if len(merged) <= MAX_CLOSED // 2:
        return merged
    return [_sum(one, other) if other else one for one, other in zip_longest(merged[::2], merged[1::2])]


def _is_complete(count: EpochCount) -> bool:
    return count.once == count.samples


def _sum(one: EpochCount, other: EpochCount) -> EpochCount:
    return EpochCount(
        epoch=one.epoch,
        num_epochs=one.num_epochs + other.num_epochs,
        samples=one.samples + other.samples,
        once=one.once + other.once,
        more=one.more + other.more,
        never=one.never + other.never,
        as_drawn=None if one.as_drawn is None else bool(one.as_drawn and other.as_drawn),
    )
