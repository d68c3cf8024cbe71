"""The real bus, a real S3 server, and a few messages to send over it."""

from resile_testing.fixtures import pool, s3

__all__ = ["pool", "s3"]
