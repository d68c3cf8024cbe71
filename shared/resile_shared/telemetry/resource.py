"""What a service says of itself with everything that it exports."""

import os
import socket
from importlib.metadata import version

from opentelemetry.sdk.resources import OTELResourceDetector, Resource


def resource_of(service: str, *, host: str = "") -> Resource:
    """Return the resource of a service, on ``host`` of the pool if it belongs to one.

    ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` take precedence, as OpenTelemetry specifies.
    """
    own = {
        "service.name": service,
        "service.namespace": "resile",
        "service.version": version("resile"),
        "service.instance.id": f"{host or service}-{socket.gethostname()}-{os.getpid()}",
        "host.name": socket.gethostname(),
        **({"resile.host": host} if host else {}),
    }
    return Resource.create().merge(Resource(own)).merge(OTELResourceDetector().detect())
