"""The agent as a service: runs one incarnation after the other until it is cancelled."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from resile_shared.bus import subjects
from resile_shared.bus.subjects import HOSTS, JOBS
from resile_shared.errors import ResileError, UsageError
from resile_shared.messages.hosts import HostGoodbye, HostHello
from resile_shared.messages.pool import PoolSettings
from resile_shared.pool_settings import load_pool_settings
from resile_shared.reachability import listening
from resile_shared.service import ServiceContext
from resile_shared.version import VERSION

from ..datasets.host_datasets import HostDatasets
from ..environments import Environments
from ..processes.client import ForkServerClient, ForkServerSettings
from ..processes.descendants import OwnProcesses, adopt_orphans, children_in_session, kill_strays
from ..processes.fork_servers import ForkServers
from .events import EndIncarnation
from .folder import AgentFolder
from .host_devices import HostDevices, detect_devices, host_devices, inheritable
from .host_workers import WorkerContext
from .incarnation import AgentIncarnation
from .job_datasets import JobDatasets
from .job_environments import JobEnvironments
from .job_files import Outputs
from .metrics import AgentMetrics
from .packages import Packages
from .settings import LearnerSettings, location_of, parse_labels

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 20.0
GOODBYE_SECONDS = 2.0


async def run(context: ServiceContext[LearnerSettings]) -> None:
    """Run the agent of this host until it is cancelled. Raises ResileError."""
    adopt_orphans()
    folder = await AgentFolder.open(context.settings.folder)
    try:
        await asyncio.to_thread(_check_storage, context.settings.storage)
        async with listening(context.settings.address, context.settings.host) as port:
            await Agent(context, folder, await _load_pool_settings(context), probe_port=port).run()
    finally:
        folder.close()


async def _load_pool_settings(context: ServiceContext[LearnerSettings]) -> PoolSettings:
    return await load_pool_settings(context.bus, detection_seconds=context.settings.detection_seconds)


def _check_storage(url: str) -> None:
    """Make sure that the storage is the pool's, and not, say, a folder of the same name on another device."""
    from resile_shared.storage.objects import (  # loads all clouds' clients
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
    """The agent of one host, in its locked ``folder``. Something says the name of the host on ``probe_port``."""

    def __init__(
        self,
        context: ServiceContext[LearnerSettings],
        folder: AgentFolder,
        pool: PoolSettings,
        *,
        probe_port: int | None = None,
    ) -> None:
        self._context = context
        self._pool = pool
        self._settings = context.settings
        self._folder = folder
        self._packages = Packages(self._settings.storage, folder.packages)
        self._environments = JobEnvironments(Environments(folder.environments, variables=inheritable(os.environ)))
        self._datasets = JobDatasets(
            HostDatasets(folder.datasets, storage=self._settings.storage, max_bytes=self._settings.data_cache_bytes)
        )
        self._outputs = Outputs(self._settings.storage)
        self._own = OwnProcesses()
        self._devices: HostDevices | None = None
        self._probe_port = probe_port
        self._metrics = AgentMetrics(context.meter)

    async def run(self) -> None:
        """Run one incarnation after the other.

        Raises ResileError when another agent runs as the same host, and VersionMismatch when the pool was upgraded.
        """
        try:
            while True:
                end = await self._run_incarnation(await self._next_incarnation())
                if end.is_superseded:
                    raise ResileError(end.reason)
                logger.warning("restarting agent: %s", end.reason)
                self._pool = await _load_pool_settings(self._context)
        finally:
            await self._datasets.close()

    async def _next_incarnation(self) -> int:
        """Return a number that no agent of this host had before, even if its folder is new."""
        stored = await self._context.bus.bucket(HOSTS).get(self._settings.host)
        incarnation = max(self._folder.incarnation, stored.value.incarnation if stored else 0) + 1
        self._folder.note_incarnation(incarnation)
        return incarnation

    async def _run_incarnation(self, incarnation: int) -> EndIncarnation:
        running: AgentIncarnation | None = None
        try:
            async with self._run_fork_servers() as fork_servers:
                await fork_servers.own.loaded()
                devices = self._devices or await self._detect_devices(fork_servers.own)
                self._devices = devices
                hello = self._hello(incarnation, devices)
                logger.info("starting agent host=%s incarnation=%s slots=%s", hello.host, incarnation, len(hello.slots))
                running = AgentIncarnation(
                    self._context.bus, hello, self._worker_context(devices), fork_servers, self._metrics
                )
                self._context.is_ready = True
                return await running.run()
        except asyncio.CancelledError:
            if running is not None:
                await self._send_goodbye(incarnation)
            raise
        finally:
            self._context.is_ready = False
            if running is not None:
                await self._close(running)

    async def _detect_devices(self, fork_server: ForkServerClient) -> HostDevices:
        found = await detect_devices(fork_server)
        devices = host_devices(found, slots=self._settings.slots, slots_per_gpu=self._settings.slots_per_gpu)
        if devices.warning:
            logger.warning("%s", devices.warning)
        return devices

    @asynccontextmanager
    async def _run_fork_servers(self) -> AsyncIterator[ForkServers]:
        """Run the host's fork servers; after the block they have ended, and all workers with them."""
        settings = ForkServerSettings(inherit=(self._folder.lock,), environment=inheritable(os.environ))
        own = await ForkServerClient.start(log=self._folder.path / "fork-server.log", settings=settings)
        fork_servers = ForkServers(own, settings, logs=self._folder.path)
        try:
            yield fork_servers
        finally:
            await asyncio.gather(own.close(), fork_servers.close())
            await asyncio.to_thread(kill_strays, children_in_session(), is_known=self._own.excludes)

    def _worker_context(self, devices: HostDevices) -> WorkerContext:
        return WorkerContext(
            host=self._settings.host,
            folder=self._folder,
            storage=self._settings.storage,
            address=self._settings.address,
            location=location_of(parse_labels(self._settings.labels)),
            devices=devices,
            packages=self._packages,
            environments=self._environments,
            datasets=self._datasets,
            outputs=self._outputs,
            jobs=self._context.bus.bucket(JOBS),
            pool=self._pool,
        )

    def _hello(self, incarnation: int, devices: HostDevices) -> HostHello:
        return HostHello(
            host=self._settings.host,
            incarnation=incarnation,
            address=self._settings.address,
            probe_port=self._probe_port,
            slots=devices.slots,
            labels=parse_labels(self._settings.labels),
            device_class=devices.device_class,
            version=VERSION,
        )

    async def _send_goodbye(self, incarnation: int) -> None:
        host = self._settings.host
        goodbye = HostGoodbye(host=host, incarnation=incarnation, reason="its agent was stopped")
        try:
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self._context.bus.publish(subjects.host_event(host, "goodbye"), goodbye)
        except (TimeoutError, ResileError) as error:
            logger.warning("goodbye not sent: %s", str(error) or "NATS is disconnected")

    async def _close(self, incarnation: AgentIncarnation) -> None:
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await incarnation.close()
        except TimeoutError:
            logger.warning("some output of workers is not stored: it takes over %g seconds", CLOSE_SECONDS)
