"""The asyncio shell: keeps the projection up to date, and serves it."""

import asyncio
import logging

from resile_shared.bus.client import Bus
from resile_shared.bus.credentials import read_credentials, write_private
from resile_shared.bus.envelope import Received
from resile_shared.bus.subjects import HEARTBEATS, HOSTS, JOBS, PROGRESS, REPORTS, TRACES, reports_of_kind
from resile_shared.messages.hosts import Heartbeat
from resile_shared.messages.reports import Report
from resile_shared.messages.spans import Spans
from resile_shared.service import ServiceContext
from resile_shared.storage.objects import ObjectStorage
from resile_shared.telemetry.metrics import gauge

from .api.application import application, serving
from .api.pool import Pool
from .history.curve_store import CurveStore
from .history.slot_store import SlotStore
from .kept_traces import Traces
from .metrics import MonitorMetrics
from .projection import Projection
from .settings import MonitorSettings
from .webhooks.core import Pace
from .webhooks.delivery import Deliveries

logger = logging.getLogger(__name__)


async def run(context: ServiceContext[MonitorSettings]) -> None:
    """Serve until cancelled."""
    settings = context.settings
    token = settings.read_token()
    storage = await asyncio.to_thread(ObjectStorage, settings.storage)
    admission = read_credentials(settings.agent_credentials) if settings.agent_credentials else None
    projection = Projection()
    curves = CurveStore(context.bus, projection)
    slots = SlotStore(context.bus, projection)
    pool = Pool(
        context.bus,
        storage,
        projection,
        curves,
        slots,
        settings.max_package_bytes,
        settings.source_seconds,
        admission=admission,
        trace_url=settings.trace_url,
        metrics=MonitorMetrics(context.meter),
    )
    probe = pool.storage_probe
    context.storage_fault = lambda: probe.fault
    gauge(context.meter, "resile_storage_writable", lambda: not probe.fault, "Whether the storage can be written.")
    served = application(pool, token=token)
    async with serving(served, host=settings.api_host, port=settings.api_port) as url:
        if settings.url_file:
            await asyncio.to_thread(write_private, settings.url_file, url.encode())
        async with asyncio.TaskGroup() as group:
            present = [asyncio.Event() for _ in range(5)]
            feed = Feed(context.bus, projection, curves)
            await feed.hear()
            await feed.hear_traces(pool.traces)
            group.create_task(feed.jobs(present[0]))
            group.create_task(feed.hosts(present[1]))
            group.create_task(feed.progress(present[2], jobs=present[0]))
            group.create_task(feed.newest_failures(present[3]))
            group.create_task(feed.warnings(present[4]))
            group.create_task(slots.follow())
            group.create_task(probe.run())
            pace = Pace(settings.webhook_seconds, settings.webhook_pause_seconds)
            group.create_task(Deliveries(context.bus, pace, trace_url=settings.trace_url).run())
            for event in present:
                await event.wait()
            context.is_ready = pool.has_caught_up = True
            group.create_task(curves.run())
            group.create_task(slots.run())


class Feed:
    """Passes what is stored and sent to the projection. Each reader sets its event once it has what was there."""

    def __init__(self, bus: Bus, projection: Projection, curves: CurveStore) -> None:
        self._bus = bus
        self._projection = projection
        self._curves = curves

    async def jobs(self, present: asyncio.Event) -> None:
        """Read the records of all jobs, forever."""
        async for changes in self._bus.bucket(JOBS).watch():
            for change in changes:
                self._projection.store_job(change.key, change.value, revision=change.revision)
            present.set()

    async def hosts(self, present: asyncio.Event) -> None:
        """Read the records of all hosts, forever."""
        async for changes in self._bus.bucket(HOSTS).watch():
            for change in changes:
                self._projection.store_host(change.key, change.value, revision=change.revision)
            present.set()

    async def hear(self) -> None:
        """Listen to heartbeats from now on."""

        async def beat(received: Received[Heartbeat]) -> None:
            self._projection.beat(received.message)

        await self._bus.subscribe(HEARTBEATS, Heartbeat, beat)

    async def hear_traces(self, traces: Traces) -> None:
        """Listen to the spans of changes from now on."""

        async def add(received: Received[Spans]) -> None:
            traces.add(received.message)

        await self._bus.subscribe(TRACES, Spans, add)

    async def progress(self, present: asyncio.Event, *, jobs: asyncio.Event) -> None:
        """Read the newest progress of each job; once ``jobs`` is set, what the curves lack and all that follows."""
        newest: dict[str, int] = {}

        async def note(received: Received[Report]) -> None:
            self._projection.report(received.message)
            newest[received.message.job] = received.sequence or 0

        async with asyncio.TaskGroup() as group:
            reading = group.create_task(
                self._bus.follow(PROGRESS, Report, note, start="last_per_subject", caught_up=present)
            )
            await present.wait()
            reading.cancel()
        await jobs.wait()
        start = await self._curves.load(newest)
        await self._bus.follow(PROGRESS, Report, self._progress, after=start)

    async def _progress(self, received: Received[Report]) -> None:
        self._projection.report(received.message)
        await self._curves.on_report(received)

    async def newest_failures(self, present: asyncio.Event) -> None:
        """Read the newest failure of each job, and those that follow, forever."""
        subjects = (reports_of_kind("failed"),)
        await self._bus.follow(
            REPORTS, Report, self._report, subjects=subjects, start="last_per_subject", caught_up=present
        )

    async def warnings(self, present: asyncio.Event) -> None:
        """Read all warnings, forever."""
        await self._bus.follow(REPORTS, Report, self._report, subjects=(reports_of_kind("warned"),), caught_up=present)

    async def _report(self, received: Received[Report]) -> None:
        self._projection.report(received.message)
