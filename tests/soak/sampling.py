"""What a pool uses while none of its jobs runs: memory, descriptors and threads of its processes, and files."""

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import orjson
import psutil

from resile.pool.worker_processes import workers_below
from resile_shared.bus.client import Bus
from resile_shared.bus.subjects import BUCKETS, STREAMS

MIB = 1 << 20
SLACK = {
    "memory": 6.0,
    "descriptors": 4.0,
    "threads": 3.0,
    "processes": 0.0,
    "files": 10.0,
    "bytes": 2.0,
    "messages": 5000.0,
    "blocks": 8.0 * len((*STREAMS, *BUCKETS)),
}
"""By the first word of a measure: MiB for memory, bytes and blocks, counts for the others.

A service remembers the newest 10,000 ids of each subscription, and the bus that a key was deleted, for a day.
Messages that nats-server has deleted stay in the newest block of their stream, of up to 8 MiB, and in its cache.
"""
_PARTS = ("nats-server", "resile_registry", "resile_scheduler", "resile_monitor", "resile_learner")
_FOLDERS = ("storage", "hosts", "logs")


async def sample(up: psutil.Process, home: Path, bus: Bus) -> dict[str, float]:
    """Measure the pool of the process ``up`` in ``home``. Workers are left out: they come and go with their jobs.

    So are the models of completed jobs, which stay until somebody deletes them.
    """
    measured: dict[str, float] = defaultdict(float)
    workers = {worker.pid for worker in workers_below(up.pid, "")}
    for process in [up, *up.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # a worker that is just ending
            if process.pid not in workers and process.status() != psutil.STATUS_ZOMBIE:
                for name, value in _used_by(process).items():
                    measured[name] += value
    for folder in _FOLDERS:
        sizes = list(_sizes(home / folder))
        measured[f"files {folder}"] = len(sizes)
        measured[f"bytes {folder}"] = sum(sizes) / MIB
    measured["blocks on disk"] = sum(_sizes(home / "bus")) / MIB
    for stream in (*(stream.name for stream in STREAMS), *(bucket.stream for bucket in BUCKETS)):
        state = orjson.loads((await bus.connection.request(f"$JS.API.STREAM.INFO.{stream}", b"")).data)["state"]
        measured["messages bus"] += state["messages"]
        measured["bytes bus"] += state["bytes"] / MIB
    return dict(measured)


def _used_by(process: psutil.Process) -> dict[str, float]:
    part = _part(process)
    memory = "blocks in memory" if part == "nats-server" else f"memory {part}"
    return {
        "processes": 1,
        memory: process.memory_full_info().uss / MIB,
        f"descriptors {part}": process.num_fds(),
        f"threads {part}": process.num_threads(),
    }


def _part(process: psutil.Process) -> str:
    """The name of the service that a process is, or belongs to."""
    for each in [process, *process.parents()]:
        command = " ".join(each.cmdline())
        if part := next((part for part in _PARTS if part in command), ""):
            return part.removeprefix("resile_")
    return "up"


def _sizes(folder: Path) -> Iterator[int]:
    for path, _, names in os.walk(folder):
        for name in names:
            file = Path(path, name)
            if file.parent.name == "models":
                continue
            try:
                yield file.lstat().st_size
            except FileNotFoundError:  # deleted meanwhile
                continue
