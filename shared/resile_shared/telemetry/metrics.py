"""Metrics of a service: what Prometheus reads at ``/metrics``, and what goes to a collector by OTLP where one is set.

Shells make their instruments with `ServiceContext.meter`, which keeps nothing unless the process serves metrics. All
values are read in the event loop, so that no reader sees a state that is being changed.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, MetricsData
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest

from .export_watch import WatchedExporter
from .resource import resource_of

logger = logging.getLogger(__name__)

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
LONG_SECONDS = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 10800.0, 43200.0, 86400.0)
EXPORT_SECONDS = 60.0
"""Seconds between two exports by OTLP, unless ``OTEL_METRIC_EXPORT_INTERVAL`` (milliseconds) says otherwise."""
Values = float | Mapping[str, float]
"""The value of a metric, or one for each value of a label."""


class ServiceMetrics:
    """The metrics of one process. `meter` makes instruments, `text` is what Prometheus reads."""

    def __init__(self, service: str, *, host: str = "", exporter: WatchedExporter | None = None) -> None:
        """``exporter`` is that of the collector, if there is one."""
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        readers: list[MetricReader] = [
            PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False, registry=self._registry)
        ]
        self._latest: _LatestMetrics | None = None
        if exporter is not None:
            self._latest = _LatestMetrics(exporter)
            readers.append(self._latest)
        self._provider = MeterProvider(readers, resource=resource_of(service, host=host), shutdown_on_exit=False)
        self.meter: Meter = self._provider.get_meter("resile")

    def text(self) -> bytes:
        """Return all metrics as they are now, in Prometheus' text format."""
        return generate_latest(self._registry)

    async def export(self) -> None:
        """Send all metrics to the collector once in a while, until cancelled. Returns at once without a collector."""
        if self._latest is None:
            return
        seconds = float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", 1000 * EXPORT_SECONDS)) / 1000
        while True:
            await asyncio.sleep(seconds)
            await self._latest.export()

    async def close(self) -> None:
        """Send all metrics to the collector a last time."""
        if self._latest is not None:
            await self._latest.export()
        await asyncio.to_thread(self._provider.shutdown)


class _LatestMetrics(MetricReader):
    """Reads all metrics in the event loop, and sends them in a thread."""

    def __init__(self, exporter: WatchedExporter) -> None:
        preferred: Any = exporter.inner
        super().__init__(preferred._preferred_temporality, preferred._preferred_aggregation)
        self._exporter = exporter
        self._read: MetricsData | None = None

    async def export(self) -> None:
        """Read and send all metrics; after a failure, the next attempt sends what is current then."""
        self.collect()
        metrics, self._read = self._read, None
        if metrics is not None:
            await asyncio.to_thread(self._exporter.export, metrics)

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 0, **_: Any) -> None:
        self._read = metrics_data

    def shutdown(self, timeout_millis: float = 0, **_: Any) -> None:
        """Close the exporter."""
        self._exporter.shutdown()


def gauge(meter: Meter, name: str, read: Callable[[], Values], description: str, *, label: str = "") -> None:
    """Have ``read`` called for the value of a gauge; a mapping has one value for each value of ``label``."""
    meter.create_observable_gauge(name, [_observing(read, label)], description=description)


def total(meter: Meter, name: str, read: Callable[[], Values], description: str, *, label: str = "") -> None:
    """Like `gauge`, for a value that only rises while the process lives."""
    meter.create_observable_counter(name, [_observing(read, label)], description=description)


def histogram(meter: Meter, name: str, description: str, *, buckets: Sequence[float] = SECONDS) -> Histogram:
    """Return a histogram of seconds; ``name`` lacks the unit, which is added."""
    return meter.create_histogram(name, "s", description, explicit_bucket_boundaries_advisory=buckets)


def _observing(read: Callable[[], Values], label: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(_: CallbackOptions) -> list[Observation]:
        values = read()
        if isinstance(values, Mapping):
            return [Observation(float(value), {label: name}) for name, value in values.items()]
        return [Observation(float(values))]

    return observe
