"""A collector of traces for benches: takes what services export by OTLP over HTTP, and keeps it."""

from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

_NANOSECONDS = 1e9


@dataclass(frozen=True)
class Span:
    """A span; times in seconds since the epoch."""

    name: str
    begin: float
    end: float
    attributes: dict[str, str | int]


@dataclass
class Collector:
    """All spans, by their traces."""

    traces: defaultdict[bytes, list[Span]] = field(default_factory=lambda: defaultdict(list))

    def begun_by(self, name: str) -> Iterator[list[Span]]:
        """The traces that hold a span of that name, in the order of these spans."""
        found = [(span.begin, spans) for spans in self.traces.values() for span in spans if span.name == name]
        yield from (spans for _, spans in sorted(found, key=lambda item: item[0]))

    async def _take(self, request: web.Request) -> web.Response:
        export = ExportTraceServiceRequest.FromString(await request.read())
        for resource in export.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    attributes = {a.key: a.value.string_value or a.value.int_value for a in span.attributes}
                    begin, end = span.start_time_unix_nano / _NANOSECONDS, span.end_time_unix_nano / _NANOSECONDS
                    self.traces[span.trace_id].append(Span(span.name, begin, end, attributes))
        return web.Response()


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    """Collect while the block runs; give the collector, and its URL for ``OTEL_EXPORTER_OTLP_ENDPOINT``."""
    collector = Collector()
    application = web.Application(client_max_size=64 << 20)
    application.add_routes([web.post("/v1/traces", collector._take)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield collector, "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()
