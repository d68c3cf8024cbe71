"""Leader election: which scheduler decides.

- The leader increments the lease's counter regularly. A standby that sees no new revision for ``seconds`` on its own
  clock takes the lease over, with the next epoch. Both write by compare-and-set, so one of two wins.
- The leader trusts its lease for ``seconds`` from the start of the last renewal, which ends before any standby takes
  over. After that it renews the lease before it executes anything.
- A standby counts only the time in which it could read the lease: while NATS is disconnected, the leader is not silent.
- A leader that ends normally releases the lease, so that the next one need not wait.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from resile_shared.bus.buckets import Bucket, ConflictError, Entry
from resile_shared.bus.subjects import LEASE_KEY
from resile_shared.errors import ResileError
from resile_shared.messages.pool import Lease as Record

logger = logging.getLogger(__name__)

RELEASE_SECONDS = 1.0


class LeadershipLost(ResileError):
    """Another scheduler has taken the lease."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"another scheduler became leader: this one, of epoch {epoch}, exits")
        self.epoch = epoch


class Lease:
    """The lease, as one scheduler sees it: `acquire` it, then `keep` it; `confirm` it before each write."""

    def __init__(
        self, bucket: Bucket[Record], *, holder: str, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bucket = bucket
        self._holder = holder
        self._seconds = seconds
        self._clock = clock
        self._record = Record(epoch=1, holder=holder, counter=0)
        self._revision = 0
        self._trusted_until = float("-inf")
        self._renewing = asyncio.Lock()
        self.position = 0
        """The sequence of the last report read by this leader, at first by the one before. Stored with each renewal."""

    @property
    def epoch(self) -> int:
        """The epoch of this leader, once the lease is acquired."""
        return self._record.epoch

    async def acquire(self) -> None:
        """Return when this scheduler is the leader."""
        standby = _Standby(patience=self._seconds)
        while True:
            begun = self._clock()
            entry = await self._bucket.get(LEASE_KEY)
            if entry is None or standby.may_take(entry, begun=begun, now=self._clock()):
                try:
                    return await self._take(entry)
                except ConflictError:
                    logger.info("another scheduler acquired the lease first")
            await asyncio.sleep(self._seconds / 8)

    async def keep(self) -> None:
        """Renew the lease forever. Raises LeadershipLost."""
        while True:
            await asyncio.sleep(self._seconds / 4)
            await self._renew()

    async def confirm(self) -> None:
        """Return when it is certain that no other scheduler is the leader. Raises LeadershipLost."""
        if self._clock() >= self._trusted_until:
            await self._renew()

    async def release(self) -> None:
        """Release the lease, if that is possible at once."""
        released = self._record.model_copy(update={"is_released": True, "position": self.position})
        with suppress(ConflictError, TimeoutError):
            async with asyncio.timeout(RELEASE_SECONDS):
                await self._bucket.update(LEASE_KEY, released, revision=self._revision)

    async def _take(self, entry: Entry[Record] | None) -> None:
        epoch = entry.value.epoch + 1 if entry else 1
        self.position = entry.value.position if entry else 0
        record = Record(epoch=epoch, holder=self._holder, counter=0, position=self.position)
        await self._write(record, entry.revision if entry else 0)

    async def _renew(self) -> None:
        async with self._renewing:
            counter = self._record.counter + 1
            try:
                renewed = self._record.model_copy(update={"counter": counter, "position": self.position})
                await self._write(renewed, self._revision)
            except ConflictError:
                raise LeadershipLost(self.epoch) from None

    async def _write(self, record: Record, revision: int) -> None:
        begun = self._clock()
        if revision:
            self._revision = await self._bucket.update(LEASE_KEY, record, revision=revision)
        else:
            self._revision = await self._bucket.create(LEASE_KEY, record)
        self._record = record
        self._trusted_until = begun + self._seconds


class _Standby:
    """Measures for how long a lease that could be read has not been renewed."""

    def __init__(self, *, patience: float) -> None:
        self._patience = patience
        self._revision = 0
        self._since = 0.0
        self._looked = float("-inf")

    def may_take(self, entry: Entry[Record], *, begun: float, now: float) -> bool:
        """Record a read from ``begun`` to ``now`` that returned ``entry``; return whether the lease has expired."""
        if entry.value.is_released:
            return True
        could_not_look = now - self._looked > self._patience / 2
        if self._revision == 0:
            logger.info("standing by leader=%s epoch=%s", entry.value.holder, entry.value.epoch)
        if entry.revision != self._revision or could_not_look:
            self._revision, self._since = entry.revision, now
        self._looked = now
        return begun - self._since >= self._patience
