"""A temporary pool for a campaign."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from resile_shared.errors import ResileError
from resile_shared.parent_death import dying_with_parent

STORAGE_SIZE = "256m"
END_SECONDS = 90.0


class TemporaryPool:
    """`resile up` in a temporary home, for ``async with``; as root with namespaces and a small storage."""

    def __init__(self, *, hosts: int, slots: int, log: Callable[[str], None]) -> None:
        self._options = ("--hosts", str(hosts), "--slots", str(slots), "--open-to-chaos")
        self._log = log
        self._stack = AsyncExitStack()
        self.home = Path()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="resile-chaos-")))
            self.home = folder / "home"
            options = [*self._options, *self._options_of_root(folder / "storage", stack)]
            self._log("starting a pool: resile up " + " ".join(options))
            await self._start(options, stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def _options_of_root(self, storage: Path, stack: AsyncExitStack) -> list[str]:
        if os.geteuid() != 0 or any(shutil.which(command) is None for command in ("ip", "tc", "nsenter")):
            return []
        storage.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={STORAGE_SIZE}", "none", storage], check=True)
        stack.callback(lambda: subprocess.run(["umount", "--lazy", storage], check=True))
        return ["--namespaces", "--storage", storage.as_uri()]

    async def _start(self, options: list[str], stack: AsyncExitStack) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "resile", "up", "--home", str(self.home), "--json", *options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=(self.home.parent / "up.log").open("wb"),
            start_new_session=True,
            preexec_fn=dying_with_parent(),
        )
        assert process.stdout is not None
        stack.push_async_callback(_end, process)
        if not await process.stdout.readline():
            output = (self.home.parent / "up.log").read_text(errors="replace").strip()
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
