"""How a service comes to the settings of its pool: it takes what the registry has stored, or refuses to differ."""

import asyncio
import logging
import time

from .bus import Bus
from .errors import UsageError
from .messages.pool import PoolSettings
from .subjects import POOL, POOL_KEY

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""In which a registry that starts beside this service may store new settings."""
PAUSE_SECONDS = 0.1


async def settings_of_pool(bus: Bus, *, detection_seconds: float | None) -> PoolSettings:
    """Return the settings of the pool; waits until a registry has stored them.

    ``detection_seconds`` is what this service was told itself, if anything. Raises UsageError if that is another value.
    """
    bucket = bus.bucket(POOL)
    told = False
    deadline: float | None = None
    while True:
        entry = await bucket.get(POOL_KEY)
        if entry is not None and detection_seconds in (None, entry.value.detection_seconds):
            return entry.value
        if entry is not None:
            deadline = deadline or time.monotonic() + GRACE_SECONDS
            if time.monotonic() >= deadline:
                raise UsageError(
                    f"--detection-seconds {detection_seconds:g}: this pool's is {entry.value.detection_seconds:g}; "
                    "leave it out here, or start the whole pool with the other value"
                )
        elif not told:
            logger.info("waiting for the registry to tell the settings of the pool")
            told = True
        await asyncio.sleep(PAUSE_SECONDS)


async def store_settings(bus: Bus, settings: PoolSettings) -> None:
    """Make ``settings`` those of the pool. Raises ConflictError when somebody else does the same."""
    bucket = bus.bucket(POOL)
    entry = await bucket.get(POOL_KEY)
    if entry is None:
        await bucket.create(POOL_KEY, settings)
    elif entry.value != settings:
        logger.info("the settings of the pool change from %s to %s", entry.value, settings)
        await bucket.update(POOL_KEY, settings, revision=entry.revision)
