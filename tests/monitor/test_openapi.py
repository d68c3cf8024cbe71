"""The document that describes the API describes the API."""

from pathlib import Path
from typing import cast

from resile_monitor.api.application import application
from resile_monitor.api.pool import Pool
from resile_monitor.history.curve_store import CurveStore
from resile_monitor.history.slot_store import SlotStore
from resile_monitor.openapi import FILE, OPERATIONS, document
from resile_monitor.projection import Projection
from resile_shared.bus.client import Bus
from resile_shared.bus.connection import Connection
from resile_shared.bus.roles import MONITOR
from resile_shared.storage.objects import ObjectStorage

ROOT = Path(__file__).parents[2]


def test_the_document_in_the_repository_is_current() -> None:
    assert (ROOT / FILE).read_bytes() == document(), "run `python -m resile_monitor.openapi`"


def test_the_document_has_every_request_and_no_other(tmp_path: Path) -> None:
    bus, projection = Bus(cast(Connection, None), service="monitor", role=MONITOR), Projection()
    storage = ObjectStorage(tmp_path.as_uri())
    pool = Pool(bus, storage, projection, CurveStore(bus, projection), SlotStore(bus, projection), max_package_bytes=1)
    routes = application(pool, token=None).router.routes()
    served = {(route.method.lower(), route.resource.canonical) for route in routes if route.resource}
    below = {(method, path) for method, path in served if path.startswith("/v1") and method != "head"}
    assert below == {(operation.method, operation.path) for operation in OPERATIONS}


def test_the_guide_names_every_request() -> None:
    guide = (ROOT / "docs/api.md").read_text()
    for operation in OPERATIONS:
        assert f"{operation.method.upper()} {operation.path}" in guide
