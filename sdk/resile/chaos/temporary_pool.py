"""A temporary pool for a campaign."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from resile_shared.errors import ResileError
from resile_shared.processes import dying_with_parent

from .s3_server import OwnStore

DISK_SIZE = "256m"
END_SECONDS = 90.0


@asynccontextmanager
async def temporary_pool(
    *, hosts: int, slots: int, with_s3: bool, log: Callable[[str], None]
) -> AsyncIterator[tuple[Path, OwnStore | None]]:
    """Run `resile up` in a temporary home; yields it, and the S3 server with the pool's storage if there is one.

    As root the pool has namespaces and small disks, but not ``with_s3``, which namespaces could not reach.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="resile-chaos-")))
        options = ["--hosts", str(hosts), "--slots", str(slots), "--open-to-chaos", "--grace-seconds", "30"]
        store = None
        if with_s3:
            store = await stack.enter_async_context(OwnStore.running(folder / "s3"))
            options += ["--storage", store.url]
        else:
            options += _options_of_root(folder, stack)
        log("starting a pool: resile up " + " ".join(options))
        await _start(folder / "home", options, stack)
        yield folder / "home", store


def _options_of_root(folder: Path, stack: AsyncExitStack) -> list[str]:
    if os.geteuid() != 0 or any(shutil.which(command) is None for command in ("ip", "tc", "nsenter")):
        return []
    storage = folder / "storage"
    for disk in (storage, folder / "home" / "bus"):
        disk.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE}", "none", disk], check=True)
        stack.callback(partial(subprocess.run, ["umount", "--lazy", disk], check=True))
    return ["--namespaces", "--storage", storage.as_uri()]


async def _start(home: Path, options: list[str], stack: AsyncExitStack) -> None:
    log = home.parent / "up.log"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "resile", "up", "--home", str(home), "--json", *options),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=log.open("wb"),
        start_new_session=True,
        preexec_fn=dying_with_parent(),
    )
    assert process.stdout is not None
    stack.push_async_callback(_end, process)
    if not await process.stdout.readline():
        output = log.read_text(errors="replace").strip()
        raise ResileError(f"the pool did not start: {output.rpartition(chr(10))[2]}")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGINT)
    try:
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
