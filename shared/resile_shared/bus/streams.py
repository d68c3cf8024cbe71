"""Creates the streams and buckets: registry and scheduler do so at each start, all others wait for them."""

import asyncio
import logging
from datetime import timedelta
from typing import Any

import orjson

from .connection import Connection, StoreFailed
from .roles import Role
from .subjects import BUCKETS, STREAMS, BucketSpec, Stream

logger = logging.getLogger(__name__)

DUPLICATES = timedelta(minutes=10)
"""The time for which the server remembers a message, and drops it if it is published again."""
POLL_SECONDS = 0.2
_NAME_IN_USE = 10058
_NOT_FOUND = 10059
_PERSISTENCE = "persist_mode"


async def provision(connection: Connection, role: Role) -> None:
    """Return when all streams and buckets that ``role`` uses exist."""
    if role.creates_streams:
        wanted = (*map(_stream_config, STREAMS), *map(_bucket_config, BUCKETS))
        await asyncio.gather(*(_create(connection, configuration) for configuration in wanted))
    else:
        for name in (
            *(stream.name for stream in role.follows),
            *(bucket.stream for bucket in (*role.reads, *role.writes)),
        ):
            await _wait_for(connection, name)


async def _create(connection: Connection, configuration: dict[str, Any]) -> None:
    name = configuration["name"]
    body = orjson.dumps(configuration)
    try:
        await connection.request_store(f"$JS.API.STREAM.CREATE.{name}", body)
    except StoreFailed as error:
        if error.code != _NAME_IN_USE:
            raise
        await _update(connection, configuration)


async def _update(connection: Connection, configuration: dict[str, Any]) -> None:
    """Change a stream. Whether it waits for the disk stays as it is: the server refuses to change that."""
    name = configuration["name"]
    stored = (await connection.request_store(f"$JS.API.STREAM.INFO.{name}", b""))["config"]
    wanted = {key: value for key, value in configuration.items() if key != _PERSISTENCE}
    if _PERSISTENCE in stored:
        wanted[_PERSISTENCE] = stored[_PERSISTENCE]
    await connection.request_store(f"$JS.API.STREAM.UPDATE.{name}", orjson.dumps(wanted))


async def _wait_for(connection: Connection, name: str) -> None:
    is_logged = False
    while True:
        try:
            await connection.request_store(f"$JS.API.STREAM.INFO.{name}", b"")
            return
        except StoreFailed as error:
            if error.code != _NOT_FOUND:
                raise
        if not is_logged:
            logger.info("waiting for the registry or the scheduler to create stream=%s", name)
            is_logged = True
        await asyncio.sleep(POLL_SECONDS)


def _stream_config(stream: Stream) -> dict[str, Any]:
    configuration = {
        "name": stream.name,
        "subjects": list(stream.subjects),
        "storage": "file",
        "retention": "limits",
        "discard": "old",
        "max_bytes": stream.max_bytes,
        "max_age": _nanoseconds(stream.max_age) if stream.max_age else 0,
        "max_msgs_per_subject": stream.max_per_subject,
        "allow_direct": True,
        "duplicate_window": _nanoseconds(DUPLICATES),
        "num_replicas": 1,
    }
    return configuration if stream.syncs else configuration | {_PERSISTENCE: "async"}


def _bucket_config(bucket: BucketSpec[Any]) -> dict[str, Any]:
    """Return the configuration by which every NATS client recognises a key-value bucket of history 1."""
    return {
        "name": bucket.stream,
        "subjects": [f"{bucket.prefix}>"],
        "storage": "file",
        "retention": "limits",
        "discard": "new",
        "max_msgs_per_subject": 1,
        "allow_rollup_hdrs": True,
        "allow_msg_ttl": True,
        "deny_delete": True,
        "allow_direct": True,
        "duplicate_window": _nanoseconds(DUPLICATES),
        "num_replicas": 1,
    }


def _nanoseconds(duration: timedelta) -> int:
    return duration // timedelta(microseconds=1) * 1000
