"""The real bus, and a few messages to send over it."""

from resile_shared.testing.fixtures import pool

__all__ = ["pool"]
