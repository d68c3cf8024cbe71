"""Histories of pools, as `resile events --json` prints them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from resile_shared.messages.message import at, timestamp

START = 1_000_000.0


def stamp(time: float) -> str:
    """The moment ``time`` seconds after the start."""
    return timestamp(at(START + time))


def job_event(
    time: float, job: str, kind: str, *, iteration: int = 0, workers: int = 0, **fields: Any
) -> dict[str, Any]:
    """One item of a job's history, ``time`` seconds after the start."""
    item = {
        "number": 1,
        "time": stamp(time),
        "kind": kind,
        "generation": 0,
        "workers": workers,
        "slots": [f"host-{1 + slot // 4}/{slot % 4}" for slot in range(workers)],
        "iteration": iteration,
    }
    data = {"job": job, "name": job, "tenant": "default", "state": "running", "priority": 5000, "item": item} | fields
    return event(time, f"resile.job.{job}.{kind}", data)


def host_event(time: float, host: str, what: str, *, slots: int = 0) -> dict[str, Any]:
    """A host that comes or goes, ``time`` seconds after the start."""
    data: dict[str, Any] = {"host": host, "incarnation": 1, "time": stamp(time)}
    if what == "joined":
        data["slots"] = [{"index": index} for index in range(slots)]
    return event(time, f"resile.host.{host}.{what}", data)


def event(time: float, subject: str, data: dict[str, Any]) -> dict[str, Any]:
    """An event as the API shows it, ``time`` seconds after the start."""
    return {"stream": "events", "sequence": 1, "time": stamp(time), "subject": subject, "data": data}


def write(folder: Path, events: Iterable[dict[str, Any]]) -> Path:
    """Write a history; return its path."""
    path = folder / "history.json"
    path.write_text(json.dumps({"events": list(events)}))
    return path


def story() -> list[dict[str, Any]]:
    """Job 1 has all eight slots, job 2 arrives, its priority is doubled, job 1 completes. 24 shards of 0.05 s."""
    limits = {"max_workers": 8, "num_shards": 24}
    return [
        host_event(0, "host-1", "joined", slots=4),
        host_event(0, "host-2", "joined", slots=4),
        job_event(1, "job-1", "accepted", **limits),
        job_event(2, "job-1", "allocation", workers=8, **limits),
        job_event(17, "job-2", "accepted", **limits),
        job_event(17, "job-1", "allocation", iteration=100, workers=4, **limits),
        job_event(18, "job-2", "allocation", workers=4, **limits),
        job_event(47, "job-2", "priority", priority=10_000, **limits),
        job_event(47, "job-1", "allocation", iteration=200, workers=3, **limits),
        job_event(48, "job-2", "allocation", iteration=100, workers=5, **limits),
        job_event(87, "job-1", "completed", iteration=300, **limits),
        job_event(88, "job-2", "allocation", iteration=260, workers=8, **limits),
        job_event(118, "job-2", "completed", iteration=460, **limits),
    ]
