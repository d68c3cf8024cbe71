"""Messages that tests send."""

from resile_shared.messages.hosts import HostHello, Slot
from resile_shared.messages.jobs import HistoryItem, JobRecord, JobSpec, JobState
from resile_shared.messages.message import at
from resile_shared.version import VERSION


def hello(incarnation: int = 1, host: str = "host-1") -> HostHello:
    return HostHello(
        host=host,
        incarnation=incarnation,
        address="127.0.0.1",
        slots=(Slot(index=0),),
        device_class="cpu",
        version=VERSION,
    )


def item(number: int, kind: str = "allocation") -> HistoryItem:
    return HistoryItem(
        number=number, time=at(0.0), kind=kind, generation=number, workers=1, slots=("host-1/0",), iteration=0
    )


def record(job: str = "job-1", *, num_items: int = 0, num_published: int = 0, args: tuple[str, ...] = ()) -> JobRecord:
    return JobRecord(
        job=job,
        spec=JobSpec(name="digits", package="packages/1", script="train.py", args=args),
        state=JobState.RUNNING,
        priority=5000,
        submitted=at(0.0),
        num_items=num_items,
        unpublished=tuple(item(number) for number in range(num_published + 1, num_items + 1)),
    )
