"""The real bus."""

from resile_shared.testing.fixtures import pool

__all__ = ["pool"]
