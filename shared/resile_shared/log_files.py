"""Limits the size of log files that other processes append to."""

import asyncio
import contextlib
import os
import shutil
from pathlib import Path

MAX_LOG_BYTES = 10 << 20
CHECK_SECONDS = 10.0


async def truncate_logs(*folders: Path, names: str = "*.log") -> None:
    """Limit the size of the logs in ``folders`` whose names match ``names``; never returns."""
    while True:
        for folder in folders:
            await asyncio.to_thread(limit_logs, folder, names)
        await asyncio.sleep(CHECK_SECONDS)


def limit_logs(folder: Path, names: str = "*.log") -> None:
    """Move the content of large logs to ``.old``. Processes keep appending to the same file."""
    for log in folder.glob(names):
        with contextlib.suppress(OSError):  # it was just removed, or is no file of ours
            if log.stat().st_size > MAX_LOG_BYTES:
                with contextlib.suppress(OSError):  # the disk is full: truncate nevertheless
                    shutil.copyfile(log, log.with_suffix(".log.old"))
                os.truncate(log, 0)
