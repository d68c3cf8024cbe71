"""The settings that all services of a pool share: the registry stores them, the others load them."""

import asyncio
import logging
import time

from .bus.client import Bus
from .bus.subjects import POOL, POOL_KEY
from .errors import ResileError, UsageError
from .messages.pool import PoolSettings
from .version import VERSION, VersionMismatch

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""How long a service waits for the registry to replace settings that differ: both may just have started."""
POLL_SECONDS = 0.1


async def load_pool_settings(bus: Bus, *, detection_seconds: float | None) -> PoolSettings:
    """Return the settings of the pool; waits until the registry has stored them.

    ``detection_seconds`` is this service's own setting, if it has one. Raises UsageError if the pool's value differs,
    and VersionMismatch if the pool's version does.
    """
    bucket = bus.bucket(POOL)
    is_logged = False
    deadline: float | None = None
    while True:
        entry = await bucket.get(POOL_KEY)
        fault = _find_fault(entry.value, detection_seconds) if entry is not None else None
        if entry is not None and fault is None:
            return entry.value
        if fault is not None:
            deadline = deadline or time.monotonic() + GRACE_SECONDS
            if time.monotonic() >= deadline:
                raise fault
        elif not is_logged:
            logger.info("waiting for the registry to store the pool settings")
            is_logged = True
        await asyncio.sleep(POLL_SECONDS)


def _find_fault(settings: PoolSettings, detection_seconds: float | None) -> ResileError | None:
    if settings.version != VERSION:
        return VersionMismatch(pool=settings.version)
    if detection_seconds not in (None, settings.detection_seconds):
        return UsageError(
            f"--detection-seconds {detection_seconds:g} differs from the pool's setting, "
            f"{settings.detection_seconds:g}: omit the option, or restart the whole pool with the new value"
        )
    return None


async def store_pool_settings(bus: Bus, settings: PoolSettings) -> None:
    """Store ``settings`` as those of the pool. Raises ConflictError when another registry does so at the same time."""
    bucket = bus.bucket(POOL)
    entry = await bucket.get(POOL_KEY)
    if entry is None:
        await bucket.create(POOL_KEY, settings)
    elif entry.value != settings:
        logger.info("changing pool settings old=%s new=%s", entry.value, settings)
        await bucket.update(POOL_KEY, settings, revision=entry.revision)
