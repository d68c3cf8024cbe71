"""Watches the disk of a pool's home. A nats-server whose disk was full refuses writes until it is restarted."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

from resile_shared.bus.nats_server import NatsServer

CHECK_SECONDS = 2.0
LEAST_FREE_BYTES = 16 << 20
"""With less free space than this, the disk counts as full."""
_REFUSED = b"no space left on device"


async def watch_disk(bus: NatsServer, log: Callable[[str], None]) -> None:
    """Report a full disk, and stop ``bus`` when there is space again, so that it is restarted; never returns."""
    was_full = False
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        full = await asyncio.to_thread(is_full, bus.folder)
        if full and not was_full:
            log(f"the disk of {bus.folder} is full: running jobs train on, but changes fail until there is space")
        if not full and _REFUSED in await asyncio.to_thread(bus.read_log):
            log("there is space on the disk again: nats-server stops, since it refuses writes until it is restarted")
            await bus.stop()
        was_full = full


def is_full(folder: Path) -> bool:
    """Whether too little space is left where ``folder`` is."""
    try:
        return shutil.disk_usage(folder).free < LEAST_FREE_BYTES
    except OSError:  # it cannot be asked now
        return False
