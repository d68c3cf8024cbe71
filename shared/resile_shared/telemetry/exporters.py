"""OTLP exporters by the standard variables (``OTEL_EXPORTER_OTLP_...``), over HTTP or gRPC, for each signal.

Traces are exported where an endpoint is named. Metrics and logs are exported where that is asked for:
``OTEL_METRICS_EXPORTER=otlp``, ``OTEL_LOGS_EXPORTER=otlp``, or an endpoint of their own. The endpoint for all signals
alone does not ask for them: a collector of traces, such as Jaeger, takes neither, metrics are served to Prometheus, and
logs go to stderr.
"""

import logging
import os
from enum import StrEnum

from opentelemetry.sdk._logs import LoggerProvider, LoggingHandler, ReadWriteLogRecord
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from ..errors import UsageError
from .export_watch import Exporter, ExportWatch, WatchedExporter, catch_library_logs
from .resource import resource_of
from .sampling import SampledSpans, ratio

logger = logging.getLogger(__name__)

_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
_HTTP, _GRPC = "http/protobuf", "grpc"
_MAX_WAITING = 2048
_MAX_BATCH = 512


class Signal(StrEnum):
    """What can be exported, as the variables name it."""

    TRACES = "TRACES"
    METRICS = "METRICS"
    LOGS = "LOGS"


def is_exported(signal: Signal) -> bool:
    """Return whether ``signal`` is to be exported."""
    chosen = os.environ.get(f"OTEL_{signal}_EXPORTER", "")
    own, general = os.environ.get(_own(signal, _ENDPOINT)), os.environ.get(_ENDPOINT)
    has_endpoint = bool(own or (general and signal is Signal.TRACES))
    return chosen == "otlp" or (has_endpoint and chosen != "none")


def protocol_of(signal: Signal) -> str:
    """Return how ``signal`` is exported, "grpc" or "http/protobuf". Raises UsageError for anything else."""
    variable = next((name for name in (_own(signal, _PROTOCOL), _PROTOCOL) if os.environ.get(name)), _PROTOCOL)
    chosen = os.environ.get(variable) or _HTTP
    if chosen not in (_HTTP, _GRPC):
        raise UsageError(f"{variable}={chosen}: must be grpc or http/protobuf")
    return chosen


def endpoint_of(signal: Signal) -> str:
    """Return where ``signal`` is sent, by the rules of OpenTelemetry."""
    is_grpc = protocol_of(signal) == _GRPC
    if own := os.environ.get(_own(signal, _ENDPOINT)):
        return own
    general = os.environ.get(_ENDPOINT) or f"http://localhost:{4317 if is_grpc else 4318}"
    return general if is_grpc else f"{general.rstrip('/')}/v1/{signal.lower()}"


def _own(signal: Signal, variable: str) -> str:
    """Return the variable for ``signal`` alone that takes precedence over ``variable``."""
    return variable.replace("OTLP_", f"OTLP_{signal}_")


class Exports:
    """The exports of one service, and what becomes of them."""

    def __init__(self, service: str, *, host: str = "") -> None:
        """Set up what the variables ask for. Raises UsageError."""
        self._service, self._host = service, host
        self._watches: dict[Signal, ExportWatch] = {}
        self._exporters: list[WatchedExporter] = []
        self._logs: LoggerProvider | None = None

    def spans(self) -> SpanProcessor | None:
        """Return what exports spans; None if they are not."""
        if not (exporter := self._open(Signal.TRACES)):
            logger.info("traces are not exported: %s is not set", _ENDPOINT)
            return None
        spans = _WatchedSpans(exporter, self._watches[Signal.TRACES])
        share = ratio()
        return SampledSpans(spans, share) if share < 1.0 else spans

    def metrics(self) -> WatchedExporter | None:
        """Return what exports metrics; None if they are not."""
        return self._open(Signal.METRICS)

    def export_logs(self) -> None:
        """Have all loggers send to the collector too, if logs are exported."""
        if exporter := self._open(Signal.LOGS):
            self._logs = LoggerProvider(resource=resource_of(self._service, host=self._host), shutdown_on_exit=False)
            self._logs.add_log_record_processor(_WatchedLogs(exporter, self._watches[Signal.LOGS]))
            logging.getLogger().addHandler(LoggingHandler(logger_provider=self._logs))

    def num_lost(self) -> dict[str, float]:
        """How many spans, log lines and readings of metrics were lost, by the kind; 0 for what is not exported."""
        lost = {signal: watch.num_lost for signal, watch in self._watches.items()}
        return {signal.lower(): lost.get(signal, 0) for signal in Signal}

    def abandon(self) -> None:
        """Wait no longer for a collector that takes nothing: a service that stops must not."""
        for exporter in self._exporters:
            if exporter.is_failing:
                exporter.shutdown()

    def close_logs(self) -> None:
        """Send the last lines."""
        if self._logs is not None:
            self._logs.shutdown()

    def _open(self, signal: Signal) -> WatchedExporter | None:
        if not is_exported(signal):
            return None
        watch = self._watches[signal] = ExportWatch(signal.lower(), endpoint_of(signal))
        watch.say_where(protocol_of(signal))
        exporter = WatchedExporter(_exporter(signal), watch)
        catch_library_logs()
        self._exporters.append(exporter)
        return exporter


class _WatchedSpans(BatchSpanProcessor):
    """Counts the spans that are dropped because too many wait."""

    def __init__(self, exporter: WatchedExporter, watch: ExportWatch) -> None:
        self._watch, self._room = watch, _room("OTEL_BSP_MAX_QUEUE_SIZE")
        sizes = {"max_queue_size": self._room, "max_export_batch_size": min(_MAX_BATCH, self._room)}
        super().__init__(exporter, **sizes)  # type: ignore[arg-type]

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span."""
        self._watch.queued(room=self._room)
        super().on_end(span)


class _WatchedLogs(BatchLogRecordProcessor):
    """Counts the lines that are dropped because too many wait."""

    def __init__(self, exporter: WatchedExporter, watch: ExportWatch) -> None:
        self._watch, self._room = watch, _room("OTEL_BLRP_MAX_QUEUE_SIZE")
        sizes = {"max_queue_size": self._room, "max_export_batch_size": min(_MAX_BATCH, self._room)}
        super().__init__(exporter, **sizes)  # type: ignore[arg-type]

    def on_emit(self, log_record: ReadWriteLogRecord) -> None:
        """Queue a line."""
        self._watch.queued(room=self._room)
        super().on_emit(log_record)


def _room(variable: str) -> int:
    """Return how many spans or lines wait to be exported, by an environment variable."""
    chosen = os.environ.get(variable, "")
    return int(chosen) if chosen.isascii() and chosen.isdecimal() and int(chosen) else _MAX_WAITING


def _exporter(signal: Signal) -> Exporter:
    """Return the exporter of ``signal``. Loads what it needs only here: most pools have no collector."""
    match signal, protocol_of(signal):
        case Signal.TRACES, "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpanExporter

            return GrpcSpanExporter()
        case Signal.TRACES, _:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            return OTLPSpanExporter()
        case Signal.METRICS, "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetricExporter

            return GrpcMetricExporter()
        case Signal.METRICS, _:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

            return OTLPMetricExporter()
        case Signal.LOGS, "grpc":
            from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter as GrpcLogExporter

            return GrpcLogExporter()
        case _:
            from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter

            return OTLPLogExporter()
