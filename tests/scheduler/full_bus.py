"""A bus that refuses to store records of jobs, as a full one does."""

import orjson

from resile_shared.bus.client import Bus
from resile_shared.bus.streams import _bucket_config
from resile_shared.bus.subjects import JOBS


async def limit_records(bus: Bus, *, max_bytes: int) -> None:
    """Let the bus refuse records of jobs with more bytes; -1: let it store all again."""
    configuration = _bucket_config(JOBS) | {"max_msg_size": max_bytes}
    await bus.connection.request_store(f"$JS.API.STREAM.UPDATE.{JOBS.stream}", orjson.dumps(configuration))
