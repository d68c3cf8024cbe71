"""The real bus, for tests of the agent."""

from resile_shared.testing.fixtures import pool

__all__ = ["pool"]
