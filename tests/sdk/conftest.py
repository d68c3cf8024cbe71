"""A pool to talk to, and the real bus."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from resile_testing.fixtures import pool

from .api_server import TOKEN, ApiServer, serving

__all__ = ["api_server", "pool"]


@pytest.fixture
def api_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """A server that the environment names, as for a pool elsewhere."""
    server = ApiServer()
    with serving(server):
        monkeypatch.setenv("RESILE_SERVER", server.url)
        monkeypatch.setenv("RESILE_TOKEN", TOKEN)
        monkeypatch.setenv("RESILE_HOME", str(tmp_path / "home"))
        yield server
