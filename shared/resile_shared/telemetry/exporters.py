"""OTLP exporters by the standard variables (``OTEL_EXPORTER_OTLP_...``), over HTTP or gRPC, for each signal.

Metrics and logs are exported where that is asked for: ``OTEL_METRICS_EXPORTER=otlp``, ``OTEL_LOGS_EXPORTER=otlp``, or
an endpoint of their own. The endpoint for all signals alone does not ask for them: a collector of traces, such as
Jaeger, takes neither, metrics are served to Prometheus, and logs go to stderr.
"""

import logging
import os
from enum import StrEnum

from opentelemetry.sdk._logs import LoggerProvider, LoggingHandler
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor, LogRecordExporter
from opentelemetry.sdk.metrics.export import MetricExporter

from .resource import resource_of


class Signal(StrEnum):
    """What can be exported besides traces, as the variables name it."""

    METRICS = "METRICS"
    LOGS = "LOGS"


def is_exported(signal: Signal) -> bool:
    """Return whether ``signal`` is to be exported."""
    chosen = os.environ.get(f"OTEL_{signal}_EXPORTER", "")
    own = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    return chosen == "otlp" or bool(own and chosen != "none")


def is_grpc(signal: Signal) -> bool:
    """Return whether ``signal`` is exported over gRPC rather than HTTP."""
    general = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    return os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", general) == "grpc"


def metric_exporter() -> MetricExporter:
    """Return the exporter of metrics. Loads what it needs only here: most pools have no collector."""
    if is_grpc(Signal.METRICS):
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetricExporter

        return GrpcMetricExporter()
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter()


def set_up_log_export(service: str, *, host: str = "") -> LoggerProvider | None:
    """Have all loggers send to the collector too, if logs are exported; `shutdown` of the result sends the last."""
    if not is_exported(Signal.LOGS):
        return None
    provider = LoggerProvider(resource=resource_of(service, host=host), shutdown_on_exit=False)
    provider.add_log_record_processor(BatchLogRecordProcessor(_log_exporter()))
    logging.getLogger().addHandler(LoggingHandler(logger_provider=provider))
    return provider


def _log_exporter() -> LogRecordExporter:
    if is_grpc(Signal.LOGS):
        from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter as GrpcLogExporter

        return GrpcLogExporter()
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter

    return OTLPLogExporter()
