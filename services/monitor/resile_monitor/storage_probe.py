"""Whether the pool's object storage takes what is written: tried again and again, for `/readyz` and the metrics."""

import asyncio
import logging
import time
from collections.abc import Callable

from resile_shared.storage.objects import ObjectStorage, StorageError

logger = logging.getLogger(__name__)

PROBE_SECONDS = 15.0
LATE_SECONDS = 30.0
_KEY = "probes/monitor"


class StorageProbe:
    """Writes a small object every ``PROBE_SECONDS``."""

    def __init__(self, storage: ObjectStorage, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._storage = storage
        self._clock = clock
        self._begun: float | None = None
        self._refusal = ""

    @property
    def fault(self) -> str:
        """Why the storage cannot be written; empty: it can, as far as is known."""
        waited = 0.0 if self._begun is None else self._clock() - self._begun
        if not self._refusal and waited > LATE_SECONDS:
            return f"a write to {self._storage.url} has not been answered for {waited:.0f} s"
        return self._refusal

    async def run(self) -> None:
        """Probe forever."""
        while True:
            await self.probe()
            await asyncio.sleep(PROBE_SECONDS)

    async def probe(self) -> None:
        """Write once."""
        before, self._begun = self._refusal, self._clock()
        try:
            await asyncio.to_thread(self._storage.put, _KEY, [b"resile"])
            self._refusal = ""
        except StorageError as error:
            self._refusal = str(error)
        finally:
            self._begun = None
        if self._refusal and not before:
            logger.warning("the storage cannot be written: %s", self._refusal)
        if before and not self._refusal:
            logger.info("the storage can be written again")
