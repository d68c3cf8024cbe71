"""The fork servers of one host: that of the pool's own environment, and one for each other environment in use."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from resile_shared.errors import ResileError

from ..environments import in_use
from .client import ForkServerClient, ForkServerSettings

KEEP_IDLE = 3
"""At most this many fork servers without workers and templates are kept, so that the next job there starts warm."""


class ForkServersClosed(ResileError):
    """No fork server is started any more, because this host ends its workers."""

    def __init__(self) -> None:
        super().__init__("this host ends its workers")


class ForkServers:
    """Has ``own``, the fork server of the pool's own environment, and starts the others with ``settings`` like it.

    Their output goes to files in ``logs``. Always `close` it; that does not close ``own``.
    """

    def __init__(self, own: ForkServerClient, settings: ForkServerSettings, *, logs: Path) -> None:
        self.own = own
        self._settings = settings
        self._logs = logs
        self._others: dict[str, ForkServerClient] = {}  # the least recently used comes first
        self._starting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def get(self, environment: str) -> ForkServerClient:
        """Return the fork server of the environment in that folder, started if needed.

        Raises OSError, ForkServersClosed.
        """
        if not environment:
            return self.own
        async with self._starting:
            if self._is_closed:
                raise ForkServersClosed
            server = self._others.pop(environment, None) or await self._start(Path(environment))
            self._others[environment] = server
        self._close_idle()
        return server  # without waiting: until it is used, it is as idle as those that are closed

    async def close(self) -> None:
        """Kill the workers in all other environments, and end their fork servers; no other is started."""
        self._is_closed = True
        others, self._others = list(self._others.values()), {}
        await asyncio.gather(*(server.close() for server in others))
        await asyncio.gather(*self._tasks)

    async def _start(self, environment: Path) -> ForkServerClient:
        with in_use(environment) as lock:
            settings = replace(
                self._settings, python=str(environment / "bin/python"), inherit=(*self._settings.inherit, lock)
            )
            self._remove_old_logs(environment.parent)
            log = self._logs / f"fork-server-{environment.name}.log"
            server = await ForkServerClient.start(log=log, settings=settings)
        self._begin(self._watch(str(environment), server))
        return server

    def _remove_old_logs(self, environments: Path) -> None:
        """Remove the logs of environments that are not there any more."""
        for log in self._logs.glob("fork-server-*.log*"):
            name = log.name.removeprefix("fork-server-").partition(".log")[0]
            if not (environments / name).is_dir():
                log.unlink(missing_ok=True)

    async def _watch(self, environment: str, server: ForkServerClient) -> None:
        """Forget a fork server that has ended: the next worker there gets another one."""
        await server.ended()
        if self._others.get(environment) is server:
            del self._others[environment]

    def _close_idle(self) -> None:
        idle = [environment for environment, server in self._others.items() if server.is_idle]
        for environment in idle[:-KEEP_IDLE]:
            self._begin(self._others.pop(environment).close())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
