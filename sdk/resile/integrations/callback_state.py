"""The attributes of a script's callbacks: part of the run's state, so that a worker that joins has them too."""

import copy
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

Attributes = dict[str, Any]


class CallbackState:
    """The plain attributes of callbacks that changed since training began here.

    Attributes that were set earlier, such as a time, stay each worker's own, and so do attributes of other kinds, such
    as open files and models. A state that is received before training has begun is applied in `begin`. ``attributes``
    returns the attributes of a callback that may change.
    """

    def __init__(
        self,
        callbacks: Callable[[], Sequence[Any]],
        *,
        attributes: Callable[[Any], Attributes] | None = None,
    ) -> None:
        self._callbacks = callbacks
        self._attributes = attributes or plain_attributes
        self._received: list[Attributes] = []
        self._at_begin: list[Attributes] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether training has begun here."""
        return self._at_begin is not None

    def begin(self) -> None:
        """Training begins on this worker: apply the received state to the callbacks."""
        self._at_begin = [copy.deepcopy(self._attributes(callback)) for callback in self._callbacks()]
        self._give()

    def changed(self) -> list[Attributes]:
        """Return, for each callback, the attributes that have changed since training began."""
        if self._at_begin is None:
            return []
        return [
            {
                name: value
                for name, value in self._attributes(callback).items()
                if name not in before or _differs(before[name], value)
            }
            for callback, before in zip(self._callbacks(), self._at_begin, strict=True)
        ]

    def digest(self, more: object = None) -> int:
        """Return a number that is the same on all workers whose callbacks, and ``more``, are in the same state."""
        return crc32(repr((more, [sorted(known.items()) for known in self.changed()])).encode())

    def load(self, received: list[Attributes]) -> None:
        """Load what `changed` returned on another worker."""
        self._received = received
        if self.has_begun:
            self._give()

    def _give(self) -> None:
        assert self._at_begin is not None
        for callback, before, received in zip(self._callbacks(), self._at_begin, self._received, strict=False):
            for name, value in {**copy.deepcopy(before), **received}.items():
                setattr(callback, name, value)


def is_everywhere(digest: int, mean: float) -> bool:
    """Whether all workers have ``digest``, whose mean over the global batch is ``mean``."""
    return abs(mean - digest) < 0.5


def plain_attributes(callback: Any) -> Attributes:
    """Return attributes of ``callback`` that are numbers, texts, None, or lists, tuples and dicts of these."""
    return {name: value for name, value in getattr(callback, "__dict__", {}).items() if _is_plain(value)}


def _differs(before: Any, value: Any) -> bool:
    """Whether a value has changed; arrays always have."""
    try:
        return bool(before != value)
    except ValueError:
        return True


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
