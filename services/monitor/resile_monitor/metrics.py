"""What a monitor measures of itself."""

import time

from aiohttp import web
from opentelemetry.metrics import Meter, NoOpMeter

from resile_shared.telemetry.metrics import histogram

from .api.problems import Handler


class MonitorMetrics:
    """The metrics of one monitor."""

    def __init__(self, meter: Meter | None = None) -> None:
        """Without ``meter`` nothing is kept."""
        meter = meter or NoOpMeter("resile")
        self._requests = histogram(meter, "resile_http_request", "Time of HTTP requests, but for those that follow.")
        self.streams = meter.create_up_down_counter("resile_event_streams", description="Clients that follow a stream.")
        self.events = meter.create_counter("resile_events_sent", description="Events sent to clients that follow.")
        self.streams.add(0)
        self.events.add(0, {"stream": "events"})

    @web.middleware
    async def measure(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Measure a request that was answered."""
        begun = time.perf_counter()
        response = await handler(request)
        if response.content_type != "text/event-stream":
            resource = request.match_info.route.resource
            labels: dict[str, str | int] = {
                "method": request.method if resource else "other",
                "route": resource.canonical if resource else "none",
                "status": response.status,
            }
            self._requests.record(time.perf_counter() - begun, labels)
        return response
