"""A simulated object store, below the product's own `ObjectStorage`: its retries and its errors are the real ones.

What is acknowledged is kept. Requests can be slow, fail before or after they were carried out, find the store full, or
list what was there a while ago; objects can be damaged.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from obstore import exceptions as foreign

from .loop import current_process
from .threads import SimThreading, crash_point

UNREACHABLE = "error sending request"
SECONDS = 0.01
"""What a request takes."""


class SimObjects:
    """All objects of a world, by key from the root of the store."""

    def __init__(self, threads: SimThreading, rng: random.Random) -> None:
        self.objects: dict[str, bytes] = {}
        self.seconds = SECONDS
        self.failing = 0.0
        """How often a request fails without effect."""
        self.ambiguous = 0.0
        """How often the answer to a request that was carried out is lost."""
        self.stale = 0.0
        """How often a listing is older than the last write."""
        self.is_full = False
        self.cut_hosts: set[str] = set()
        """Hosts that do not reach the store."""
        self.on_write: list[Callable[[str, bytes], None]] = []
        """Called with the key and the content of each object before it is written."""
        self.on_read: list[Callable[[str], None]] = []
        """Called with the key of each object after it was read."""
        self.on_delete: list[Callable[[str], None]] = []
        """Called with the key of each object before it is deleted."""
        self.num_requests = 0
        self.num_faults = 0
        self._threads = threads
        self._rng = rng
        self._before: dict[str, bytes] = {}
        self._hidden: dict[str, bytes] | None = None
        """What is hidden; None: nothing is."""

    def hide(self) -> None:
        """Let everything be gone for a while, as of a file system that is not mounted."""
        self._hidden = {**(self._hidden or {}), **self.objects}
        self.objects = {}

    def show(self) -> None:
        """Let what was hidden be there again, beside what was stored meanwhile."""
        self.objects = {**(self._hidden or {}), **self.objects}
        self._hidden = None

    def upload(self, key: str, content: bytes) -> None:
        """Store an object from a machine that sees what is hidden from others."""
        (self.objects if self._hidden is None else self._hidden)[key] = content

    def open(self, url: str, *, creates: bool, request_seconds: float) -> "SimStore":
        return SimStore(self, url.partition("://")[2].rstrip("/") + "/")

    def damage(self, key: str) -> None:
        """Change a byte of an object."""
        content = bytearray(self.objects[key])
        if content:
            content[self._rng.randrange(len(content))] ^= 1
        self.objects[key] = bytes(content)

    def request(self) -> None:
        """Take the time of a request. Raises what a client raises that does not reach the store."""
        crash_point()
        self.num_requests += 1
        process = current_process()
        thread = self._threads.current_thread()
        if thread is not None and thread.is_running():
            self._threads.sleep(self.seconds * (0.5 + self._rng.random()))
        if (process is not None and process.host in self.cut_hosts) or self._draw(self.failing):
            self.num_faults += 1
            raise foreign.GenericError(UNREACHABLE)

    def answer(self) -> None:
        """Raise if the answer to a request that was carried out is lost."""
        crash_point()
        if self._draw(self.ambiguous):
            self.num_faults += 1
            raise foreign.GenericError(UNREACHABLE)

    def write(self, key: str, content: bytes) -> None:
        if self.is_full:
            self.num_faults += 1
            raise foreign.GenericError("os error 28")
        for call in self.on_write:
            call(key, content)
        self._before = dict(self.objects) if self.stale else {}
        self.objects[key] = content

    def listed(self) -> dict[str, bytes]:
        return self._before if self._before and self._draw(self.stale) else self.objects

    def _draw(self, probability: float) -> bool:
        return probability > 0 and self._rng.random() < probability


class SimStore:
    """In place of obstore's store of one URL."""

    def __init__(self, all_objects: SimObjects, root: str) -> None:
        self._all = all_objects
        self._root = root

    def put(self, key: str, content: Any, *, mode: str = "overwrite", **_: object) -> None:
        data = _joined(content)
        self._all.request()
        if mode == "create" and self._root + key in self._all.objects:
            raise foreign.AlreadyExistsError(key)
        self._all.write(self._root + key, data)
        self._all.answer()

    def head(self, key: str) -> dict[str, Any]:
        return {"path": key, "size": len(self._read(key))}

    def get(self, key: str) -> "_Got":
        return _Got(self._read(key))

    def get_range(self, key: str, *, start: int, end: int) -> bytes:
        return self._read(key)[start:end]

    def list(self, prefix: str) -> Iterator[list[dict[str, Any]]]:
        self._all.request()
        start, found = self._root + prefix, self._all.listed()
        yield [
            {"path": key.removeprefix(self._root), "size": len(found[key])}
            for key in sorted(found)
            if key.startswith(start)
        ]

    def delete(self, keys: str | Iterable[str]) -> None:
        self._all.request()
        for key in [keys] if isinstance(keys, str) else reversed(list(keys)):  # in any order, as S3 does
            for call in self._all.on_delete:
                call(self._root + key)
            self._all.objects.pop(self._root + key, None)
        self._all.answer()

    def _read(self, key: str) -> bytes:
        self._all.request()
        try:
            found = self._all.objects[self._root + key]
        except KeyError:
            raise FileNotFoundError(key) from None
        for call in self._all.on_read:
            call(self._root + key)
        return found


class _Got:
    def __init__(self, content: bytes) -> None:
        self._content = content

    def bytes(self) -> bytes:
        return self._content


def _joined(content: bytes | Path | Sequence[bytes | memoryview]) -> bytes:
    if isinstance(content, Path):
        return content.read_bytes()
    return content if isinstance(content, bytes) else b"".join(content)
