"""Starting a service for a test: in this process, or in one of its own that can be killed."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from resile_shared.bus.client import Bus
from resile_shared.bus.credentials import read_credentials
from resile_shared.service import Run, S, ServiceContext

from .fixtures import Pool
from .waiting import until


@asynccontextmanager
async def in_process(
    pool: Pool, name: str, run: Run[S], settings: type[S], **values: object
) -> AsyncIterator[ServiceContext[S]]:
    """Run a service in this event loop; yield when it is ready. Raises its error if it exits early."""
    credentials = pool.server.credentials(name)
    bus = await Bus.open(read_credentials(credentials), service=name)
    context = ServiceContext(name, settings.model_validate({"credentials": credentials, **values}), bus)
    running = asyncio.ensure_future(run(context))
    try:
        await until(lambda: context.is_ready or running.done())
        yield context
    finally:
        ended = running.done()
        running.cancel()
        await asyncio.wait({running})
        await bus.close()
        if ended:
            running.result()


@asynccontextmanager
async def as_process(pool: Pool, name: str, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run ``python -m resile_<name>`` in its own process, which is killed on exit. Does not wait until it is ready."""
    credentials = str(pool.server.credentials(name))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"resile_{name}", "--credentials", credentials, *flags
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
