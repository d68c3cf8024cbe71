"""The client of a pool for ordinary programs and notebooks: `client.AsyncClient` on an event loop of its own.

::

    from resile import Client

    with Client() as client:
        job = client.submit_script("train.py", max_workers=4)
        job.watch()
        job.save_model("model.safetensors")
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from resile_shared.errors import ResileError

from .client import AsyncClient
from .http_requests import Server
from .job import Job
from .job_options import JobOptions
from .sync_calls import SyncCalls

T = TypeVar("T")
_END = object()


class Client(SyncCalls):
    """A connection to one pool. Every call raises Unreachable when it does not answer, Refused when it rejects it."""

    def __init__(self, server: Server | str | None = None) -> None:
        """Connect to ``server``, or to the one that `client.find_server` finds for this URL or without it."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="resile-client", daemon=True)
        self._thread.start()
        try:
            self._client = self._run(_connect(server))
        except BaseException:
            self._stop_loop()
            raise
        self.server = self._client.server

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect. The client can no longer be used."""
        if not self._loop.is_closed():
            self._run(self._client.__aexit__())
            self._stop_loop()

    def submit_script(self, path: Path | str, *, args: Sequence[str] = (), **options: Unpack[JobOptions]) -> Job:
        """Upload a script, or a folder with one, and submit it with ``args`` as `resile submit` does; return the job.

        Warns of files that are not sent. Raises UsageError if an option is invalid.
        """
        return Job(self, self._run(self._client.submit_script(path, args=args, **options)))

    def get_job(self, name: str) -> Job:
        """Return the job that has the id ``name``, or is the only one of that name, to watch and change it."""
        return Job(self, self.find(name))

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        """Return what ``call`` returns; cancel it when this thread is interrupted."""
        if self._loop.is_closed():
            call.close()
            raise ResileError("this client is closed: create another one")
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        async def step() -> Any:
            return await anext(items, _END)

        async def end() -> None:
            await items.aclose()  # type: ignore[attr-defined]

        try:
            while (item := self._run(step())) is not _END:
                yield item
        finally:
            with suppress(ResileError):  # closed meanwhile
                self._run(end())

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _connect(server: Server | str | None) -> AsyncClient:
    return AsyncClient(server)
