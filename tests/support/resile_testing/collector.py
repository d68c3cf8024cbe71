"""A collector: keeps the spans, metrics and logs that services export by OTLP, over HTTP or gRPC."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
DELAY = "OTEL_BSP_SCHEDULE_DELAY"
_NANOSECONDS = 1e9
_ERROR = 2  # Status.STATUS_CODE_ERROR


@dataclass(frozen=True)
class Span:
    """A span; times in seconds since the epoch."""

    name: str
    begin: float
    end: float
    attributes: dict[str, str | int]
    """The attributes of the span; those of Resile without their prefix ``resile.``."""
    id: bytes = b""
    parent: bytes = b""
    """The id of the parent; empty: the trace began with this span."""
    service: str = ""
    resource: dict[str, str | int] = field(default_factory=dict)
    """The attributes of what made the span; those of Resile without their prefix."""
    error: str = ""
    """Why it has failed, in words; empty: it has not."""


@dataclass
class Collector:
    """All spans, by trace; the names of metrics, and the bodies of log records."""

    url: str = ""
    metrics: set[str] = field(default_factory=set)
    logs: list[str] = field(default_factory=list)
    traces: defaultdict[bytes, list[Span]] = field(default_factory=lambda: defaultdict(list))

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make services export to it, with a short delay."""
        return {ENDPOINT: self.url, DELAY: "1000"}

    def started_by(self, name: str) -> list[list[Span]]:
        """Return the traces that contain a span of that name, in the order of these spans."""
        found = [(span.begin, spans) for spans in list(self.traces.values()) for span in spans if span.name == name]
        return [spans for _, spans in sorted(found, key=lambda item: item[0])]

    def add_metrics(self, request: ExportMetricsServiceRequest) -> None:
        """Add the metrics of one export request."""
        scopes = (scope for resource in request.resource_metrics for scope in resource.scope_metrics)
        self.metrics.update(metric.name for scope in scopes for metric in scope.metrics)

    def add_logs(self, request: ExportLogsServiceRequest) -> None:
        """Add the log records of one export request."""
        scopes = (scope for resource in request.resource_logs for scope in resource.scope_logs)
        self.logs.extend(record.body.string_value for scope in scopes for record in scope.log_records)

    def add(self, request: ExportTraceServiceRequest) -> None:
        """Add the spans of one export request."""
        for resource in request.resource_spans:
            about = _values(resource.resource.attributes)
            service = str(about["service.name"])
            for scope in resource.scope_spans:
                for span in scope.spans:
                    begin, end = span.start_time_unix_nano / _NANOSECONDS, span.end_time_unix_nano / _NANOSECONDS
                    error = (span.status.message or "failed") if span.status.code == _ERROR else ""
                    ids = span.span_id, span.parent_span_id, service, about, error
                    self.traces[span.trace_id].append(Span(span.name, begin, end, _values(span.attributes), *ids))

    def orphans(self) -> list[Span]:
        """Return the spans whose parents are not known."""
        return [
            span
            for spans in list(self.traces.values())
            for span in spans
            if span.parent and span.parent not in {other.id for other in spans}
        ]


def _values(attributes: Iterable[KeyValue]) -> dict[str, str | int]:
    return {a.key.removeprefix("resile."): a.value.string_value or a.value.int_value for a in attributes}


_SIGNALS: dict[str, tuple[Any, Any, Callable[[Collector, Any], None]]] = {
    "trace": (ExportTraceServiceRequest, ExportTraceServiceResponse, Collector.add),
    "metrics": (ExportMetricsServiceRequest, ExportMetricsServiceResponse, Collector.add_metrics),
    "logs": (ExportLogsServiceRequest, ExportLogsServiceResponse, Collector.add_logs),
}
"""For each signal its request, its response, and what is done with it."""
_OF_PATH = {"/v1/traces": "trace", "/v1/metrics": "metrics", "/v1/logs": "logs"}


@contextmanager
def collecting(address: str = "127.0.0.1", port: int = 0) -> Iterator[Collector]:
    """Run a collector while the block runs."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request, _, add = _SIGNALS[_OF_PATH[self.path]]
            add(collector, request.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
            pass

    with ThreadingHTTPServer((address, port), Handler) as server:
        collector.url = f"http://{address}:{server.server_port}"
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        try:
            yield collector
        finally:
            server.shutdown()
            serving.join()


@contextmanager
def collecting_by_grpc(address: str = "127.0.0.1", port: int = 0) -> Iterator[Collector]:
    """Run a collector that speaks gRPC while the block runs."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    for signal in ("trace", "metrics", "logs"):
        server.add_generic_rpc_handlers((_receiver(collector, signal),))
    collector.url = f"http://{address}:{server.add_insecure_port(f'{address}:{port}')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def _receiver(collector: Collector, signal: str) -> grpc.GenericRpcHandler:
    """Return the service that takes one signal."""
    request, response, add = _SIGNALS[signal]

    def export(received: Any, _: grpc.ServicerContext) -> Any:
        add(collector, received)
        return response()

    method = grpc.unary_unary_rpc_method_handler(export, request.FromString, response.SerializeToString)
    service = f"opentelemetry.proto.collector.{signal}.v1.{signal.capitalize()}Service"
    return grpc.method_handlers_generic_handler(service, {"Export": method})
