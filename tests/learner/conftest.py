"""The real bus and a real S3 server, for tests of the agent and of what it stores."""

from resile_shared.testing.fixtures import pool, s3

__all__ = ["pool", "s3"]
