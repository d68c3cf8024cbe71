"""The ledger: how often each sample was used, counted from the indices that committed iterations really fetched.

It is part of every checkpoint and of the result, so it has at most `MAX_CLOSED` entries besides that of the epoch under
way: when there are more, epochs that follow each other share an entry with their sums.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resile_shared.messages.reports import EpochCount

from .batches import Indices

MAX_CLOSED = 1000


class Ledger:
    """Counts uses of samples, epoch by epoch. ``drawn`` returns the indices that a sampler draws in an epoch.

    Without ``num_samples`` an epoch has as many as the highest index says.
    """

    def __init__(self, num_samples: int | None = None, drawn: Callable[[int], Indices] | None = None) -> None:
        self._num_samples = num_samples or 0
        self._grows = num_samples is None
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
        if self._grows and len(indices):
            missing = max(0, int(indices.max()) + 1 - len(self._uses))
            self._uses = np.concatenate([self._uses, np.zeros(missing, dtype=np.uint32)])
        np.add.at(self._uses, indices, 1)
        self.samples_seen += len(indices)

    def epochs(self) -> tuple[EpochCount, ...]:
        """The counts of all epochs started, those of the current one so far."""
        return (*self._closed, self._count()) if self.samples_seen else ()

    def _count(self) -> EpochCount:
        once = int(np.count_nonzero(self._uses == 1))
        never = int(np.count_nonzero(self._uses == 0))
        return EpochCount(
            epoch=self._epoch,
            samples=len(self._uses),
            once=once,
            more=len(self._uses) - once - never,
            never=never,
            as_drawn=self._is_as_drawn(self._drawn) if self._drawn else None,
        )

    def _is_as_drawn(self, drawn: Callable[[int], Indices]) -> bool:
        """Whether the samples used so far are the first of the epoch that a sampler drew."""
        first = drawn(self._epoch)[: int(self._uses.sum())]
        return np.array_equal(self._uses, np.bincount(first, minlength=self._num_samples))

    def _unused(self) -> NDArray[np.uint32]:
        return np.zeros(self._num_samples, dtype=np.uint32)

    def state_dict(self) -> dict[str, Any]:
        """The ledger as plain values."""
        return {
            "closed": [count.model_dump() for count in self._closed],
            "epoch": self._epoch,
            "uses": self._uses,
            "samples_seen": self.samples_seen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned elsewhere."""
        self._closed = [EpochCount(**count) for count in state["closed"]]
        self._epoch = state["epoch"]
        self._uses = np.array(state["uses"], dtype=np.uint32)
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
