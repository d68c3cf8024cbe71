"""Where the members of a generation leave what the others need to connect their process groups.

Each entry goes to every member over the authenticated control connections: there is no server that others could reach,
and no stranger can add an entry.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

MAX_ENTRIES = 4096
"""Maximum number of entries of one generation."""


class Board:
    """The entries of one generation. From any thread."""

    def __init__(self) -> None:
        self._entries: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        """Add an entry; beyond ``MAX_ENTRIES``, new entries are dropped."""
        with self._changed:
            if key in self._entries or len(self._entries) < MAX_ENTRIES:
                self._entries[key] = value
                self._changed.notify_all()

    def get(self, keys: Sequence[str], seconds: float, is_closed: Callable[[], bool]) -> list[bytes]:
        """Return the values of ``keys`` once all are there. Raises TimeoutError, and also once ``is_closed()``."""
        with self._changed:
            self._changed.wait_for(lambda: is_closed() or self.has(keys), seconds)
            if is_closed() or not self.has(keys):
                raise TimeoutError(f"nobody has left {', '.join(keys)} within {seconds:g} seconds")
            return [self._entries[key] for key in keys]

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all of ``keys`` have entries."""
        return all(key in self._entries for key in keys)

    def wake(self) -> None:
        """Make all waiting threads check again."""
        with self._changed:
            self._changed.notify_all()


class PeerStore(Store):
    """The store of torch.distributed over a `Board`. ``send`` sends an entry of this member to the others."""

    def __init__(self, board: Board, send: Callable[[str, bytes], None], *, timeout: timedelta) -> None:
        super().__init__()
        self._board = board
        self._send = send
        self._seconds = timeout.total_seconds()
        self._closed = False

    def close(self) -> None:
        """End all waits, now and later. From any thread."""
        self._closed = True
        self._board.wake()

    def _wait_for(self, keys: Sequence[str], seconds: float) -> list[bytes]:
        return self._board.get(keys, seconds, lambda: self._closed)

    def set(self, key: str, value: bytes | str) -> None:
        """See ``torch.distributed.Store.set``."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._board.put(key, data)
        self._send(key, data)

    def get(self, key: str) -> bytes:
        """See ``torch.distributed.Store.get``."""
        return self._wait_for([key], self._seconds)[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """See ``torch.distributed.Store.wait``."""
        self._wait_for(keys, timeout.total_seconds() if timeout else self._seconds)

    def check(self, keys: Sequence[str]) -> bool:
        """See ``torch.distributed.Store.check``."""
        return self._board.has(keys)
