"""A pool on this machine, and the jobs that benches train on it: an MLP with AdamW that notes its iterations."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from stamps import Stamps

from resile.client import AsyncClient, find_server
from resile.package import pack
from resile.pool.home import PoolHome
from resile.pool.services import PoolOptions
from resile.pool.supervisor import Supervisor
from resile_shared.messages.jobs import JobSpec
from resile_testing.collector import Collector, collecting

SCRIPT = Path(__file__).resolve().with_name("rescaled.py")
BATCH_SIZE = 96
NUM_SHARDS = 12  # 1, 2, 3 and 4 workers share them evenly


def arguments(stamps: Path, *, body: str = "shard") -> tuple[str, ...]:
    """Return what the script is called with, to note its iterations in ``stamps``, with a body for each ``body``."""
    settings = {"--millions": 1, "--batch-size": BATCH_SIZE, "--num-shards": NUM_SHARDS}
    settings |= {"--stamps": stamps, "--body": body}
    return tuple(str(word) for pair in settings.items() for word in pair)


async def submit(
    client: AsyncClient, stamps: Stamps, *, name: str, min_workers: int = 1, max_workers: int, script: Path = SCRIPT
) -> str:
    """Submit a job that notes its iterations in ``stamps``; return its id."""
    package = await asyncio.to_thread(pack, script)
    spec = JobSpec(
        name=name,
        package=await client.upload(package.content),
        script=package.script,
        args=arguments(stamps.path),
        min_workers=min_workers,
        max_workers=max_workers,
    )
    return await client.submit(spec)


@asynccontextmanager
async def pool_up(home: Path, options: PoolOptions) -> AsyncIterator[AsyncClient]:
    """A pool whose processes are children of this one, while the block runs."""
    pool = PoolHome(home)
    ready = asyncio.Event()
    supervisor = Supervisor(pool, options, log=lambda line: print(line, file=sys.stderr))
    running = asyncio.create_task(supervisor.run(lambda url: ready.set()))
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        async with AsyncClient(find_server(home=home)) as client:
            yield client
            for job in await client.jobs():
                if not job.state.is_final:
                    await client.stop(job.id)
    finally:
        waiting.cancel()
        running.cancel()
        await asyncio.wait({running})
        await supervisor.kill()
        pool.close()


@contextmanager
def traced() -> Iterator[Collector]:
    """Collect the traces of pools that are up only while the block runs."""
    with collecting() as collector:
        os.environ |= collector.environment
        try:
            yield collector
        finally:
            for variable in collector.environment:
                del os.environ[variable]
