"""The agent as a service: one incarnation after the other, until it is told to end."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from resile_shared import subjects
from resile_shared.errors import ResileError, UsageError
from resile_shared.messages.hosts import HostGoodbye, HostHello
from resile_shared.messages.pool import PoolSettings
from resile_shared.pool_settings import load_pool_settings
from resile_shared.service import ServiceContext
from resile_shared.subjects import HOSTS, JOBS

from ..processes.client import ForkServerClient, ForkServerSettings
from .events import End
from .folder import AgentFolder
from .life import Life
from .machine import Machine, inheritable, look_around
from .outputs import Outputs
from .packages import Packages
from .processes import Place
from .settings import LearnerSettings, parse_labels

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 20.0
GOODBYE_SECONDS = 2.0


async def run(context: ServiceContext[LearnerSettings]) -> None:
    """Run the agent of this host until it is cancelled. Raises ResileError."""
    folder = await AgentFolder.open(context.settings.folder)
    try:
        await asyncio.to_thread(_check_storage, context.settings.storage)
        pool = await load_pool_settings(context.bus, detection_seconds=context.settings.detection_seconds)
        await Agent(context, folder, pool).run()
    finally:
        folder.close()


def _check_storage(url: str) -> None:
    """Make sure that the storage is the pool's, and not, say, a folder of the same name on another machine."""
    from resile_shared.storage import (  # loads all clouds' clients
        PROBE,
        MissingObjectError,
        ObjectStorage,
        StorageError,
    )

    try:
        ObjectStorage(url).read(PROBE)
    except MissingObjectError as error:
        raise UsageError(f"--storage: {url} is not this pool's storage: give the URL that the pool uses") from error
    except StorageError as error:
        raise UsageError(f"--storage: {error}") from error


class Agent:
    """The agent of one host, in its locked ``folder``."""

    def __init__(self, context: ServiceContext[LearnerSettings], folder: AgentFolder, pool: PoolSettings) -> None:
        self._context = context
        self._pool = pool
        self._settings = context.settings
        self._folder = folder
        self._packages = Packages(self._settings.storage, folder.packages)
        self._outputs = Outputs(self._settings.storage)
        self._machine: Machine | None = None

    async def run(self) -> None:
        """Live one incarnation after the other. Raises ResileError when another agent has taken the host over."""
        while True:
            end = await self._live(await self._next_incarnation())
            if end.is_superseded:
                raise ResileError(end.reason)
            logger.warning("beginning anew: %s", end.reason)

    async def _next_incarnation(self) -> int:
        """Take a number that no agent of this host had before, also where its folder is a new one."""
        stored = await self._context.bus.bucket(HOSTS).get(self._settings.host)
        incarnation = max(self._folder.incarnation, stored.value.incarnation if stored else 0) + 1
        self._folder.note_incarnation(incarnation)
        return incarnation

    async def _live(self, incarnation: int) -> End:
        life: Life | None = None
        try:
            async with self._warm() as fork_server:
                machine = self._machine = self._machine or await self._look_around()
                await fork_server.loaded()
                hello = self._hello(incarnation, machine)
                logger.info("host %s, incarnation %s, has %s slots", hello.host, incarnation, len(hello.slots))
                life = Life(self._context.bus, hello, self._place(machine), fork_server)
                self._context.is_ready = True
                return await life.run()
        except asyncio.CancelledError:
            if life is not None:
                await self._say_goodbye(incarnation)
            raise
        finally:
            self._context.is_ready = False
            if life is not None:
                await self._close(life)

    @asynccontextmanager
    async def _warm(self) -> AsyncIterator[ForkServerClient]:
        """Run a fork server; after the block it has ended, and all workers with it."""
        settings = ForkServerSettings(inherit=(self._folder.lock,), environment=inheritable(os.environ))
        fork_server = await ForkServerClient.start(log=self._folder.path / "fork-server.log", settings=settings)
        try:
            yield fork_server
        finally:
            await fork_server.close()

    async def _look_around(self) -> Machine:
        return await look_around(slots=self._settings.slots, slots_per_gpu=self._settings.slots_per_gpu)

    def _place(self, machine: Machine) -> Place:
        return Place(
            folder=self._folder,
            storage=self._settings.storage,
            address=self._settings.address,
            slots=machine.slots,
            packages=self._packages,
            outputs=self._outputs,
            jobs=self._context.bus.bucket(JOBS),
            pool=self._pool,
        )

    def _hello(self, incarnation: int, machine: Machine) -> HostHello:
        return HostHello(
            host=self._settings.host,
            incarnation=incarnation,
            address=self._settings.address,
            slots=machine.slots,
            labels=parse_labels(self._settings.labels),
            device_class=machine.device_class,
        )

    async def _say_goodbye(self, incarnation: int) -> None:
        host = self._settings.host
        goodbye = HostGoodbye(host=host, incarnation=incarnation, reason="its agent was told to end")
        try:
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self._context.bus.publish(subjects.host_event(host, "goodbye"), goodbye)
        except (TimeoutError, ResileError) as error:
            logger.warning("the pool could not be told goodbye: %s", str(error) or "the bus is away")

    async def _close(self, life: Life) -> None:
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await life.close()
        except TimeoutError:
            logger.warning("some output of workers is not stored: it took over %g seconds", CLOSE_SECONDS)
