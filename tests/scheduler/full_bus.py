"""A bus that refuses to store records of jobs, or events, as a full one does."""

import orjson

from resile_shared.bus.client import Bus
from resile_shared.bus.streams import _bucket_config, _stream_config
from resile_shared.bus.subjects import EVENTS, JOBS


async def limit_records(bus: Bus, *, max_bytes: int) -> None:
    """Let the bus refuse records of jobs with more bytes; -1: let it store all again."""
    configuration = _bucket_config(JOBS) | {"max_msg_size": max_bytes}
    await bus.connection.request_store(f"$JS.API.STREAM.UPDATE.{JOBS.stream}", orjson.dumps(configuration))


async def limit_events(bus: Bus, *, max_bytes: int) -> None:
    """Let the bus refuse events with more bytes; -1: let it store all again."""
    configuration = _stream_config(EVENTS) | {"max_msg_size": max_bytes}
    await bus.connection.request_store(f"$JS.API.STREAM.UPDATE.{EVENTS.name}", orjson.dumps(configuration))
