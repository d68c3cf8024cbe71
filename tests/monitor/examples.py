"""Records and reports that tests show to a monitor."""

from typing import Any

from resile_shared.messages.hosts import Heartbeat, HostRecord, HostState, Slot, WorkerReport
from resile_shared.messages.jobs import HistoryItem, JobRecord, JobSpec, JobState
from resile_shared.messages.message import at
from resile_shared.messages.reports import Completed, Content, EpochCount, Progress, Ready, Report
from resile_shared.version import VERSION

PACKAGE = f"packages/{'ab' * 32}.tar.gz"
SPEC = JobSpec(name="digits", package=PACKAGE, script="train.py", args=("--fast",), max_workers=8)
READY = Ready(iterations_total=1000, num_shards=24, batch_size=192, epochs=5, samples=1797, bits="same bits")
COMPLETED = Completed(
    iteration=1000,
    epoch=4,
    samples_seen=8985,
    loss=0.1,
    metrics={},
    validation={"accuracy": 0.97},
    params_sha256="ab" * 32,
    model="models/lineage-1.safetensors",
    ledger=(EpochCount(epoch=0, samples=1797, once=1797, more=0, never=0),),
    bits="same bits",
)


def item(number: int, *, generation: int, iteration: int, kind: str = "allocation", workers: int = 2) -> HistoryItem:
    return HistoryItem(
        number=number,
        time=at(number),
        kind=kind,
        generation=generation,
        workers=workers,
        slots=tuple(f"host-1/{index}" for index in range(workers)),
        iteration=iteration,
        reason="fair share with job-2",
    )


def job(name: str = "job-1", **changes: Any) -> JobRecord:
    record = JobRecord(
        job=name,
        spec=SPEC,
        state=JobState.RUNNING,
        priority=5000,
        submitted=at(0.0),
        generation=1,
        ready=READY,
    )
    return with_history(record, item(1, generation=1, iteration=0)).model_copy(update=changes)


def with_history(record: JobRecord, *items: HistoryItem) -> JobRecord:
    """What the scheduler stores with these items, which are not published yet."""
    end: dict[str, Any] = {"num_items": len(items), "unpublished": items, "iteration": items[-1].iteration}
    last = {"kind": items[-1].kind, "reason": items[-1].reason}
    allocations = [item for item in items if item.kind == "allocation"]
    return record.model_copy(update={**end, **last, "allocation": allocations[-1] if allocations else None})


def report(content: Content, *, generation: int = 1, name: str = "job-1", worker: int = 0) -> Report:
    return Report(
        job=name,
        host="host-1",
        incarnation=1,
        worker=worker,
        slot=0,
        generation=generation,
        time=at(1.0),
        content=content,
    )


def progress(iteration: int, **fields: Any) -> Progress:
    values: dict[str, Any] = {"epoch": 0, "loss": 1.0, "iteration_seconds": 0.5, "samples_seen": 192 * iteration}
    return Progress(iteration=iteration, **(values | fields))


def host(name: str = "host-1", **changes: Any) -> HostRecord:
    record = HostRecord(
        host=name,
        incarnation=1,
        state=HostState.UP,
        address="127.0.0.1",
        slots=(Slot(index=0), Slot(index=1)),
        labels={"zone": "a"},
        device_class="cpu",
        version=VERSION,
        since=at(0.0),
    )
    return record.model_copy(update=changes)


def beat(*workers: WorkerReport, number: int = 1, incarnation: int = 1, name: str = "host-1") -> Heartbeat:
    return Heartbeat(host=name, incarnation=incarnation, number=number, workers=workers)


def worker(slot: int = 0, **fields: Any) -> WorkerReport:
    return WorkerReport(**({"job": "job-1", "worker": slot, "slot": slot, "state": "member"} | fields))
