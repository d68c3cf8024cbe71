"""What a service says of itself with everything that it exports, and what a worker's script may say of itself."""

import os
import socket
from collections.abc import Mapping
from importlib.metadata import version
from urllib.parse import quote

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


def script_variables(service: str, attributes: Mapping[str, str | int]) -> dict[str, str]:
    """Return the variables by which a script that uses OpenTelemetry exports as ``service`` with ``attributes``.

    Those that the environment has already are kept.
    """
    own = ",".join(f"{name}={quote(str(value), safe='')}" for name, value in attributes.items())
    given = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return {"OTEL_SERVICE_NAME": service, "OTEL_RESOURCE_ATTRIBUTES": f"{given},{own}" if given else own}
