"""What all services share: settings, logs, traces, metrics, the bus, health checks, and a clean shutdown.

    async def run(context: ServiceContext[SchedulerSettings]) -> None:
        ...                  # connect handlers to context.bus
        context.is_ready = True
        ...                  # until cancelled; `finally` blocks drain

    main("scheduler", SchedulerSettings, run)

SIGTERM and SIGINT cancel ``run``; further signals change nothing. A service that fails prints one line, and exits with
a status other than 0.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import uvloop
from aiohttp import web
from opentelemetry.metrics import Meter, NoOpMeter

from .bus.client import Bus
from .bus.connection import BusClosed
from .bus.credentials import read_credentials, write_private
from .errors import ResileError, UsageError
from .http.server import listening
from .processes import raise_descriptor_limit
from .readiness import Readiness
from .settings import ServiceSettings, load
from .telemetry.exporters import Exports
from .telemetry.metrics import CONTENT_TYPE, ServiceMetrics, gauge, total
from .telemetry.span_queue import SpanQueue
from .telemetry.traces import set_up_logging, set_up_tracing

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0
"""Seconds that calls in threads have to end when all else has ended."""

EXPORT_SECONDS = 3.0
"""Seconds that a collector has to take the last metrics, logs and spans of a service that ends."""

S = TypeVar("S", bound=ServiceSettings)


@dataclass
class ServiceContext(Generic[S]):
    """What a service runs in."""

    name: str
    settings: S
    bus: Bus
    is_ready: bool = False
    """Whether the service can do its work; the service sets it."""
    meter: Meter = field(default_factory=lambda: NoOpMeter("resile"))
    """The maker of the instruments of the service's metrics."""
    storage_fault: Callable[[], str] = str
    """Why the object storage cannot be written; empty: it can, or this service does not try."""

    def readiness(self) -> Readiness:
        """Whether the service can do its work."""
        return Readiness.of(self.bus, is_ready=self.is_ready, storage_fault=self.storage_fault())


Run = Callable[[ServiceContext[S]], Awaitable[None]]


def main(name: str, settings: type[S], run: Run[S], *, arguments: Sequence[str] | None = None) -> None:
    """Run a service until it is stopped; the whole ``__main__`` of a service."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = _run(runner, name, settings, run, arguments)
        # Python waits for calls in threads, and one to a storage that does not answer may take an hour.
        killing = threading.Timer(CLOSE_SECONDS, os._exit, (status,))
        killing.daemon = True
        killing.start()
    if status:
        sys.exit(status)


def _run(runner: asyncio.Runner, name: str, settings: type[S], run: Run[S], arguments: Sequence[str] | None) -> int:
    """Run a service, and print why it failed; return the exit status."""
    try:
        chosen = load(settings, program=f"resile_{name}", arguments=arguments)
        raise_descriptor_limit()
        runner.run(serve(name, chosen, run))
    except ResileError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_status
    except Exception as error:
        expected, unexpected = error.split(ResileError) if isinstance(error, ExceptionGroup) else (None, error)
        if unexpected is not None or expected is None:
            traceback.print_exc()
            return 1
        for leaf in _leaves(expected):
            print(f"{name}: {leaf}", file=sys.stderr)
        return 1
    return 0


async def serve(name: str, settings: S, run: Run[S]) -> None:
    """Run a service in the current event loop until it ends, or a signal cancels it."""
    set_up_logging(name, form=settings.log_format, level=settings.log_level)
    host = settings.host_id
    exports = Exports(name, host=host)
    exports.export_logs()
    spans, exported = SpanQueue(name), exports.spans()
    tracing = set_up_tracing(name, host=host, processors=(spans, exported) if exported else (spans,))
    metrics = ServiceMetrics(name, host=host, exporter=exports.metrics())
    health: Health[S] = Health(metrics)
    exporting = asyncio.ensure_future(metrics.export())
    work = asyncio.ensure_future(_work(name, settings, run, health, spans, exports))

    def stop(reason: str) -> None:
        if not work.cancelling():  # a second signal would interrupt what drains
            work.cancel(reason)

    handle_signals(stop, supervised=settings.supervised)
    try:
        async with _serving_health(health, settings):
            await asyncio.wait({work})
        if not work.cancelled():
            work.result()
        logger.info("stopped")
    finally:
        work.cancel()
        exporting.cancel()
        await asyncio.wait({work, exporting})
        exports.abandon()
        await _send_last(metrics.close(), asyncio.to_thread(tracing.shutdown), asyncio.to_thread(exports.close_logs))


async def _send_last(*last: Coroutine[Any, Any, None]) -> None:
    """Send what a collector lacks, unless it does not answer: a service that is stopped must not wait for it."""
    closing = {asyncio.ensure_future(export) for export in last}
    done, late = await asyncio.wait(closing, timeout=EXPORT_SECONDS)
    for export in late:
        export.cancel()
    for export in done:
        export.result()
    if late:
        logger.warning("the collector did not take the last telemetry within %g s: it is lost", EXPORT_SECONDS)


def handle_signals(stop: Callable[[str], None], *, supervised: bool) -> None:
    """Call ``stop`` at a signal that ends a service; ``supervised``: at the end of stdin, whatever signals come.

    systemd, Slurm and container runtimes send SIGTERM to all processes at once. The one that started the others then
    decides when each of them ends. They have a handler, and do not ignore the signal, which their children would, too.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, *((signal.SIGHUP,) if supervised else ())):
        note = f"received {number.name}"
        loop.add_signal_handler(number, logger.info if supervised else stop, note)

    def read_stdin() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            loop.remove_reader(sys.stdin.fileno())
            stop("stdin ended")

    if supervised:
        loop.add_reader(sys.stdin.fileno(), read_stdin)


async def _work(name: str, settings: S, run: Run[S], health: "Health[S]", spans: SpanQueue, exports: Exports) -> None:
    """Connect and run. Raises BusClosed when the connection is closed for good."""
    bus = await Bus.open(read_credentials(settings.credentials), service=name)
    health.context = ServiceContext(name, settings, bus, meter=health.metrics.meter)
    _observe(health.context, exports)
    logger.info("started")
    running = asyncio.ensure_future(run(health.context))
    sending = asyncio.ensure_future(spans.run(bus))
    closed = asyncio.ensure_future(bus.connection.closed.wait())
    try:
        await asyncio.wait({running, closed, sending}, return_when=asyncio.FIRST_COMPLETED)
        if sending.done():
            sending.result()
        if not running.done():
            raise BusClosed
        running.result()
    finally:
        closed.cancel()
        running.cancel()
        sending.cancel()
        await asyncio.wait({running, sending})
        if bus.is_up:
            await spans.flush(bus)
        await bus.close()


def _observe(context: ServiceContext[S], exports: Exports) -> None:
    """Make the metrics that every service has."""
    meter, bus = context.meter, context.bus
    gauge(meter, "resile_ready", lambda: context.is_ready, "Whether the service can do its work.")
    gauge(meter, "resile_bus_connected", lambda: bus.is_up, "Whether NATS is connected.")
    gauge(
        meter,
        "resile_bus_stores",
        lambda: not bus.connection.store_health.fault,
        "Whether the bus stores what the service sends.",
    )
    total(
        meter,
        "resile_bus_messages_dropped",
        lambda: {"handler too slow": bus.connection.num_dropped, "NATS disconnected": bus.num_not_sent},
        "Messages, of those that are repeated anyway, that were not handled or not sent.",
        label="reason",
    )
    total(
        meter,
        "resile_telemetry_lost",
        exports.num_lost,
        "Spans, log lines and readings of metrics that no collector took.",
        label="signal",
    )


class Health(Generic[S]):
    """Probes for orchestrators: ``/healthz`` while the event loop runs, ``/readyz`` when the service can work.

    It also serves ``/metrics``, for Prometheus.
    """

    def __init__(self, metrics: ServiceMetrics) -> None:
        self.metrics = metrics
        self.context: ServiceContext[S] | None = None

    def application(self) -> web.Application:
        """Return the web application."""
        application = web.Application()
        application.add_routes([web.get("/healthz", self._healthz), web.get("/readyz", self._readyz)])
        application.add_routes([web.get("/metrics", self._metrics)])
        return application

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "alive"})

    async def _readyz(self, _: web.Request) -> web.Response:
        if self.context is None:
            return web.json_response({"bus": False, "service": False}, status=503)
        return self.context.readiness().response()


@asynccontextmanager
async def _serving_health(health: Health[S], settings: S) -> AsyncIterator[None]:
    if settings.health_port is None:
        yield
        return
    async with AsyncExitStack() as stack:
        host, port = settings.health_host, settings.health_port
        try:
            url = await stack.enter_async_context(listening(health.application(), host=host, port=port))
        except OSError as error:
            raise UsageError(f"--health-port: cannot listen on {host}:{port}: {error.strerror}") from error
        logger.info("health check listening url=%s/readyz", url)
        if settings.health_file is not None:
            write_private(settings.health_file, url.encode())
        yield


def _leaves(group: ExceptionGroup[ResileError]) -> list[ResileError]:
    found: list[ResileError] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, ExceptionGroup) else [error]
    return found
