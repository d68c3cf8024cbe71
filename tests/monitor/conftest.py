"""The real bus, and real monitors on it."""

from resile_testing.fixtures import pool

from .monitors import monitors, scene

__all__ = ["monitors", "pool", "scene"]
