"""Reading a stream: an iterable dataset, sample by sample, in an order that is fixed by (seed, epoch)."""

import copy
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from resile_shared.errors import UsageError

from ..digest import content_digest
from ..seeds import mix, seed_all

StreamState = dict[str, Any]
"""The ``state_dict()`` of the stream and of its iterator, as far as they have one."""


def is_stream(dataset: Any) -> bool:
    """Whether ``dataset`` is iterable, and not map-style."""
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))


class StreamReader:
    """Reads the samples of one epoch after the other.

    Sample i of epoch e is read with all generators seeded by (seed, e, i); ``set_epoch(e)`` is called where there is
    one. A stream that has ``state_dict`` and ``load_state_dict``, itself or its iterator, continues from a state, as
    torchdata's StatefulDataLoader has it; any other is read again up to the sample. Raises UsageError for iterators,
    which can be read once, and for an epoch that begins with another sample when it is read again.
    """

    def __init__(self, stream: Any, *, seed: int) -> None:
        self._stream = stream
        self._seed = seed
        self._iterator: Iterator[Any]
        self._epoch = -1
        self.sample = 0
        """How many samples of the epoch were read."""
        self.first: tuple[int, str] | None = None
        """The epoch of which the first sample was read last, and a digest of that sample."""

    def open(self, epoch: int, sample: int, state: StreamState | None) -> None:
        """Continue with ``sample`` of ``epoch``, from a ``state`` that was taken there, if any."""
        seed_all(mix(self._seed, "stream", epoch))
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(epoch)
        if state and state["stream"] is not None:
            self._stream.load_state_dict(copy.deepcopy(state["stream"]))
        self._epoch, self.sample = epoch, sample if state else 0
        self._iterator = iter(self._stream)
        if self._iterator is self._stream and not _has_state(self._stream):
            raise UsageError(
                f"the dataset ({type(self._stream).__name__}) is an iterator, which can be read once: give one whose "
                "__iter__ starts over for each epoch, or with state_dict and load_state_dict"
            )
        if state and state["iterator"] is not None:
            self._iterator.load_state_dict(copy.deepcopy(state["iterator"]))  # type: ignore[attr-defined]
        while self.sample < sample:
            try:
                self.read()
            except StopIteration:
                raise UsageError(
                    f"the stream ended after {self.sample} samples of epoch {epoch}, where it had more than {sample} "
                    "before: let it yield the same samples each time it is read, on every worker"
                ) from None

    def read(self) -> Any:
        """Return the next sample. Raises StopIteration at the end of the epoch."""
        seed_all(mix(self._seed, "sample", self._epoch, self.sample))
        item = next(self._iterator)
        if self.sample == 0:
            self._check_first(item)
        self.sample += 1
        return item

    def _check_first(self, item: Any) -> None:
        before, self.first = self.first, (self._epoch, content_digest(item)[:16])
        if before and before[0] == self._epoch and before != self.first:
            raise UsageError(
                f"the stream ({type(self._stream).__name__}) begins epoch {self._epoch} with another sample than "
                "before: let __iter__ start over each time, whatever was read before, or give the stream state_dict "
                "and load_state_dict"
            )

    def state(self) -> StreamState | None:
        """The state in which the next sample is read; None where the stream has none."""
        iterator = getattr(self, "_iterator", None)
        states = {"stream": _state_of(self._stream), "iterator": _state_of(iterator)}
        return states if any(each is not None for each in states.values()) else None


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _state_of(value: Any) -> Any:
    return copy.deepcopy(value.state_dict()) if _has_state(value) else None
