"""Fixtures for tests against the real bus: ``pytest_plugins = ["resile_shared.testing.fixtures"]``."""
