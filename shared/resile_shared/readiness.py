"""What `/readyz` says: whether a service can do its work, and if not, why."""

from dataclasses import dataclass

from aiohttp import web

from .bus.client import Bus


@dataclass(frozen=True)
class Readiness:
    """Whether a service can do its work."""

    bus: bool
    """Whether NATS is connected."""
    service: bool
    """Whether the service itself is ready."""
    bus_storage: str
    """Why the bus does not store what the service sends; empty: it does."""
    storage: str
    """Why the object storage cannot be written; empty: it can, or this service does not try."""
    seconds_since_stored: float | None
    """Seconds since the bus stored something for this service; None: it had nothing to store."""

    @classmethod
    def of(cls, bus: Bus, *, is_ready: bool, storage_fault: str = "") -> "Readiness":
        """Return the readiness of a service on ``bus``."""
        stores = bus.connection.store_health
        return cls(bus.is_up, is_ready, stores.fault, storage_fault, stores.seconds_since_stored)

    def response(self) -> web.Response:
        """Return the response: 200 if all is well, else 503 with the reasons."""
        faults = {"bus_storage": self.bus_storage, "storage": self.storage}
        facts = {"bus": self.bus, "service": self.service, **{name: not fault for name, fault in faults.items()}}
        reasons = {name: fault for name, fault in faults.items() if fault}
        body = {**facts, "reasons": reasons, "seconds_since_stored": self.seconds_since_stored}
        return web.json_response(body, status=200 if all(facts.values()) else 503)
