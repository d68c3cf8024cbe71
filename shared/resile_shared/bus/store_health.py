"""Whether the bus stores what a service sends: known from the answers to its writes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LATE_SECONDS = 5.0
"""A write that is not answered for so many seconds counts as refused."""


class StoreHealth:
    """What became of the writes of one connection."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun: dict[object, float] = {}
        """When each write began that is not answered yet."""
        self._refusal = ""
        self._stored: float | None = None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around one write, however often it is sent."""
        write = object()
        self._begun[write] = self._clock()
        try:
            yield
        finally:
            del self._begun[write]

    def on_stored(self) -> None:
        """A write was stored."""
        self._refusal, self._stored = "", self._clock()

    def on_refused(self, reason: str) -> None:
        """The server could not store a write, which is sent again."""
        self._refusal = reason

    @property
    def seconds_since_stored(self) -> float | None:
        """Seconds since the newest write was stored; None: none was."""
        return None if self._stored is None else self._clock() - self._stored

    @property
    def fault(self) -> str:
        """Why the bus does not store what was sent last; empty: it does, as far as is known."""
        waited = self._clock() - min(self._begun.values(), default=self._clock())
        if not self._refusal and waited > LATE_SECONDS:
            return f"a write has not been answered for {waited:.0f} s"
        return self._refusal
