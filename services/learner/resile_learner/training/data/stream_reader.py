"""Reading a stream: an iterable dataset, sample by sample, in an order that is fixed by (seed, epoch)."""

import copy
from collections.abc import Iterator
from contextlib import suppress
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
    one. A stream continues from a state if it or its iterator has ``state_dict`` and ``load_state_dict``, as for
    torchdata's StatefulDataLoader; any other is read again up to the sample. A stream may carry something from epoch to
    epoch. A reader that begins at the start of an epoch therefore first reads the end of the epoch before: from its
    state, or else the whole epoch. Raises UsageError for iterators, which can be read only once, and for an epoch that
    has other samples when it is read again.
    """

    def __init__(self, stream: Any, *, seed: int) -> None:
        self._stream = stream
        self._seed = seed
        self._iterator: Iterator[Any]
        self._epoch = -1
        self._has_ended = False
        self.sample = 0
        """The number of samples of the epoch that were read."""
        self.read_before: tuple[int, dict[int, str]] | None = None
        """An epoch that was read, and digests of its samples 0, 1, 2, 4, 8, ... by their numbers."""

    def open(self, epoch: int, sample: int, state: StreamState | None) -> None:
        """Continue with ``sample`` of ``epoch``, from a ``state`` that was taken there, if any.

        The state at the first sample of an epoch is the one at the end of the epoch before.
        """
        if sample == 0 and epoch > 0 and not (self._epoch == epoch - 1 and self._has_ended):
            self._end_epoch(epoch - 1, state)
        self._begin(epoch)
        if sample and state:
            self._load_stream(state)
        self._iterate()
        if sample and state:
            self._load_iterator(state)
            self.sample = sample
        while self.sample < sample:
            try:
                self.read()
            except StopIteration:
                raise UsageError(
                    f"the stream ended after {self.sample} samples of epoch {epoch}, where it had more than {sample} "
                    "before: let it yield the same samples each time it is read, on every worker"
                ) from None

    def _begin(self, epoch: int) -> None:
        seed_all(mix(self._seed, "stream", epoch))
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(epoch)
        self._epoch, self.sample, self._has_ended = epoch, 0, False

    def _iterate(self) -> None:
        self._iterator = iter(self._stream)
        if self._iterator is self._stream and not _has_state(self._stream):
            raise UsageError(
                f"the dataset ({type(self._stream).__name__}) is an iterator, which can be read once: give one whose "
                "__iter__ starts over for each epoch, or with state_dict and load_state_dict"
            )

    def _end_epoch(self, epoch: int, state: StreamState | None) -> None:
        """Bring the stream to where it is after ``epoch``; ``state``, if any, was taken at the end of that epoch."""
        self._begin(epoch)
        if state is None:
            self._iterate()
            with suppress(StopIteration):
                while True:
                    self.read()
            return
        self._load_stream(state)
        self._iterate()
        self._load_iterator(state)
        if next(self._iterator, _END) is not _END:  # the state is already that of an epoch to come
            self._load_stream(state)

    def _load_stream(self, state: StreamState) -> None:
        if state["stream"] is not None:
            self._stream.load_state_dict(copy.deepcopy(state["stream"]))

    def _load_iterator(self, state: StreamState) -> None:
        if state["iterator"] is not None:
            self._iterator.load_state_dict(copy.deepcopy(state["iterator"]))  # type: ignore[attr-defined]

    def read(self) -> Any:
        """Return the next sample. Raises StopIteration at the end of the epoch."""
        seed_all(mix(self._seed, "sample", self._epoch, self.sample))
        try:
            item = next(self._iterator)
        except StopIteration:
            self._has_ended = True
            raise
        if self.sample & (self.sample - 1) == 0:
            self._check_sample(content_digest(item)[:16])
        self.sample += 1
        return item

    def _check_sample(self, digest: str) -> None:
        epoch, digests = self.read_before or (self._epoch, {})
        known = digests if epoch == self._epoch else {}
        self.check_same(self.sample, known.get(self.sample, digest), digest)
        self.read_before = (self._epoch, {**known, self.sample: digest})

    def check_same(self, sample: int, before: str, now: str) -> None:
        """Raises UsageError unless number ``sample`` of the epoch has the digest that it had ``before``."""
        if before != now:
            raise UsageError(
                f"the stream ({type(self._stream).__name__}) {'begins' if sample == 0 else 'continues'} epoch "
                f"{self._epoch} with another sample than before: let __iter__ start over each time, whatever was read "
                "before, and depend on the epoch by set_epoch alone, or give the stream state_dict and load_state_dict "
                "with all that its samples depend on"
            )

    def state(self) -> StreamState | None:
        """The state in which the next sample is read; None where the stream has none."""
        iterator = getattr(self, "_iterator", None)
        states = {"stream": _state_of(self._stream), "iterator": _state_of(iterator)}
        return states if any(each is not None for each in states.values()) else None


_END = object()


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _state_of(value: Any) -> Any:
    return copy.deepcopy(value.state_dict()) if _has_state(value) else None
