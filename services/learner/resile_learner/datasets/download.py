"""The download of a dataset: files of a source into a folder, whose digest is known at its end."""

import hashlib
import os
import threading
from collections.abc import Mapping
from concurrent.futures import wait
from pathlib import Path
from typing import TYPE_CHECKING

from ..threads import start_thread

if TYPE_CHECKING:
    from resile_shared.storage.dataset_sources import Listing

NUM_THREADS = 8
_PIECE_BYTES = 8 << 20


class Cancelled(Exception):
    """Nobody waits for the fetch any more."""


class Download:
    """Fetches the files of a source into a folder; ``num_bytes`` have arrived. Blocks, in threads of its own."""

    def __init__(self, listing: "Listing", folder: Path, cancelled: threading.Event) -> None:
        self.num_bytes = 0
        self._listing = listing
        self._folder = folder
        self._cancelled = cancelled
        self._error: BaseException | None = None
        self._digests: dict[str, str] = {}
        self._keys = iter(sorted(listing.files))
        self._lock = threading.Lock()

    def run(self) -> str:
        """Return the digest of all files. Raises StorageError, OSError, Cancelled."""
        threads = [start_thread(self._fetch_files) for _ in range(min(NUM_THREADS, len(self._listing.files)))]
        wait(threads)
        if self._error is not None:
            raise self._error
        return _digest_of(self._digests)

    def _fetch_files(self) -> None:
        try:
            while True:
                with self._lock:
                    key = next(self._keys, None)
                if key is None:
                    return
                self._digests[key] = self._fetch_file(key)
        except BaseException as error:  # the first one is the cause of the others
            with self._lock:
                self._error = self._error or error

    def _fetch_file(self, key: str) -> str:
        path = self._folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        num_bytes = self._listing.files[key].num_bytes
        sha = hashlib.sha256()
        with path.open("xb") as file:
            for start in range(0, num_bytes, _PIECE_BYTES):
                if self._error or self._cancelled.is_set():
                    raise Cancelled
                piece = self._listing.storage.read_range(key, start, min(start + _PIECE_BYTES, num_bytes))
                sha.update(piece)
                file.write(piece)
                with self._lock:
                    self.num_bytes += len(piece)
            file.flush()
            os.fsync(file.fileno())
        path.chmod(0o444)
        return sha.hexdigest()


def _digest_of(files: Mapping[str, str]) -> str:
    """The sha256, in hex, of the names of files and the digests of their contents."""
    return hashlib.sha256("".join(f"{key}\0{digest}\n" for key, digest in sorted(files.items())).encode()).hexdigest()
