"""The real bus."""

from resile_testing.fixtures import pool

__all__ = ["pool"]
