"""A pool's own history as a workload: what happened, to be simulated under any policy.

The file is the output of ``resile events --json``, or of ``resile events -f --json`` with an event in each line. From
it are taken:

- the jobs, when they were submitted, their limits, and what users asked of them: priorities, pauses, stops;
- how long their iterations took, by number of workers (`training.Recorded`), which includes what changes cost;
- the weights and quotas of tenants, as far as they changed;
- the hosts, and when they came and went.

What the policy of that time decided is not taken, nor are failures of single workers. A job that failed counts as
complete at the iteration at which it did.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from pydantic import BaseModel, ValidationError

from resile_shared.bus.catalogue import model_of
from resile_shared.bus.envelope import Malformed
from resile_shared.http.api import EventView
from resile_shared.messages.commands import JobPause, JobPriority, JobResume, JobStop, TenantDelete, TenantSet
from resile_shared.messages.hosts import (
    MAX_SLOTS_OF_HOST,
    HostDraining,
    HostEvent,
    HostJoined,
    HostLeft,
    HostLost,
    HostState,
)
from resile_shared.messages.jobs import HistoryItem, JobEvent, JobSpec
from resile_shared.messages.pool import TenantEvent
from resile_shared.validation import phrase

from .csv_table import MOST_SECONDS, MalformedFile
from .training import Recorded, too_long
from .workload import CHECKPOINT_SECONDS, HostChange, Submission, UserRequest, Workload

_STATES: dict[type[HostEvent], HostState] = {
    HostJoined: HostState.UP,
    HostDraining: HostState.DRAINING,
    HostLost: HostState.LOST,
    HostLeft: HostState.LEFT,
}
_EXACT = ("allocation", "completed", "paused")
"""The kinds of history items with the exact iteration at which they happened; that of others may lag behind."""


def read_history(path: Path) -> Workload:
    """Return what happened to a pool as a workload.

    Raises:
        MalformedFile: the file cannot be read, or no job in it has trained.

    """
    read = list(_read_events(path))
    events = [event for _, event in read]
    of_jobs: defaultdict[str, list[JobEvent]] = defaultdict(list)
    places: dict[str, _Place] = {}
    of_hosts = [event for event in events if isinstance(event, HostEvent)]
    for place, event in read:
        if isinstance(event, JobEvent):
            of_jobs[event.job].append(event)
            places[event.job] = place
    recorded = [_RecordedJob(job) for job in of_jobs.values()]
    trained = [job for job in recorded if job.seconds]
    if not trained:
        raise MalformedFile(path, "no job in it has trained: there is nothing to simulate")
    start = min(job.items[0].time for job in recorded)
    start = min([start, *(event.time for event in of_hosts)])
    for place, event in read:
        _check(path, place, event, start)
    requests = [request for job in trained for request in job.requests(start)]
    requests += [_tenant_request(event, start) for event in events if isinstance(event, TenantEvent)]
    delays = [delay for job in trained if (delay := job.start_delay) is not None]
    return Workload(
        submissions=tuple(sorted((_submission(path, job, places[job.id], start) for job in trained), key=_time)),
        requests=tuple(sorted(requests, key=_time)),
        hosts=(*_unannounced(of_hosts, recorded), *_host_changes(of_hosts, start)),
        start_seconds=min(delays, default=None),
        left_out=tuple(job.id for job in recorded if not job.seconds),
    )


# what is in the file


class _Place(NamedTuple):
    """Where an event is."""

    line: int
    inside: str
    """The path to the event in its document, if the document has several."""

    def malformed(self, path: Path, problem: str, *fields: str) -> MalformedFile:
        """Return the error about ``fields``, the path to a part of the event."""
        return MalformedFile(path, problem, line=self.line, column=".".join(filter(None, (self.inside, *fields))))


def _check(path: Path, place: _Place, event: BaseModel, start: datetime) -> None:
    """Check what no schema of an event bounds. Raises MalformedFile."""
    if isinstance(event, JobEvent):
        time, field = event.item.time, "item.time"
        for name in event.item.slots:
            if int(name.rpartition("/")[2]) >= MAX_SLOTS_OF_HOST:
                problem = f"there is no slot {name}: a host has {MAX_SLOTS_OF_HOST} at most"
                raise place.malformed(path, problem, "data", "item.slots")
    else:
        assert isinstance(event, HostEvent | TenantEvent)
        time, field = event.time, "time"
    if (time - start).total_seconds() > MOST_SECONDS:
        raise place.malformed(path, "more than ten years after the first event", "data", field)


def _submission(path: Path, job: "_RecordedJob", place: _Place, start: datetime) -> Submission:
    """Return what was submitted. Raises MalformedFile at the job's newest event, which has its limits."""
    try:
        submission = job.submission(start)
        submission.ready()
    except ValidationError as error:
        fault = error.errors()[0]
        raise place.malformed(path, phrase(fault["msg"]), "data", *map(str, fault["loc"])) from error
    training = submission.training
    if problem := too_long(training, min(submission.spec.max_workers, training.num_shards)):
        raise place.malformed(path, problem, "data", "iterations_total")
    return submission


def _time(happens: Submission | UserRequest) -> float:
    return happens.time


def _read_events(path: Path) -> Iterator[tuple[_Place, BaseModel]]:
    for place, entry in _entries(path):
        try:
            view = EventView.model_validate(entry)
            model = model_of(view.subject)
            if issubclass(model, JobEvent | HostEvent | TenantEvent):
                yield place, model.model_validate(view.data)
        except ValidationError as error:
            fault = error.errors()[0]
            is_view = error.title == EventView.__name__
            raise place.malformed(
                path, phrase(fault["msg"]), "" if is_view else "data", *map(str, fault["loc"])
            ) from error
        except Malformed as error:
            raise place.malformed(path, str(error), "subject") from error


def _entries(path: Path) -> Iterator[tuple[_Place, Any]]:
    """Yield each event, and where it is."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise MalformedFile(path, f"cannot be read: {error}") from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise MalformedFile(path, "it is empty: `resile events --tail 10000 --json` prints a history")
    documents = [(number, _parse(path, line, first=number)) for number, line in lines] if _is_lines(lines) else None
    for number, document in documents or [(1, _parse(path, text, first=1))]:
        if isinstance(document, dict) and isinstance(events := document.get("events"), list):
            yield from ((_Place(number, f"events[{index}]"), event) for index, event in enumerate(events))
        else:
            yield _Place(number, ""), document


def _is_lines(lines: Sequence[tuple[int, str]]) -> bool:
    """Whether each line is a document of its own, and not all lines together."""
    try:
        orjson.loads(lines[0][1])
    except orjson.JSONDecodeError:
        return False
    return True


def _parse(path: Path, text: str, *, first: int) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise MalformedFile(
            path, f"not JSON: {error.msg}", line=first + error.lineno - 1, column=str(error.colno)
        ) from error


# jobs


class _RecordedJob:
    """The events of one job, in their order."""

    def __init__(self, events: Sequence[JobEvent]) -> None:
        self._events = events
        self._newest = events[-1]
        self.id = self._newest.job
        self.items = [event.item for event in events]
        self.seconds = _seconds_by_workers(self.items)

    @property
    def start_delay(self) -> float | None:
        """Seconds from its submission to its first iteration, if it got slots at once."""
        kinds = [item.kind for item in self.items[:2]]
        if kinds != ["accepted", "allocation"]:
            return None
        return (self.items[1].time - self.items[0].time).total_seconds()

    def submission(self, start: datetime) -> Submission:
        """Return what was submitted."""
        newest, first = self._newest, self._events[0]
        limits = [event.num_shards for event in self._events if event.num_shards]
        num_shards = limits[-1] if limits else max(item.workers for item in self.items)
        spec = JobSpec(
            name=newest.name,
            package="packages/1",
            script="train.py",
            min_workers=newest.min_workers,
            max_workers=newest.max_workers,
            sizes=newest.sizes,
            priority=first.priority,
            tenant=newest.tenant,
            group=newest.group,
        )
        training = Recorded(self._iterations_total(), num_shards, self.seconds)
        return Submission(_after(start, self.items[0]), self.id, spec, training, CHECKPOINT_SECONDS)

    def _iterations_total(self) -> int:
        reached = max(item.iteration for item in self.items)
        if self.items[-1].kind in ("completed", "failed"):
            return max(1, self.items[-1].iteration)
        return max(1, reached, self._newest.iterations_total or 0)

    def requests(self, start: datetime) -> Iterator[UserRequest]:
        """Yield what users wanted."""
        is_paused = False
        for event in self._events:
            item, time = event.item, _after(start, event.item)
            match item.kind:
                case "priority":
                    yield UserRequest(time, JobPriority(job_id=self.id, priority=event.priority))
                case "stopped":
                    yield UserRequest(time, JobStop(job_id=self.id))
                case "pausing" | "paused" if not is_paused:
                    is_paused = True
                    yield UserRequest(time, JobPause(job_id=self.id))
                case "queued" | "allocation" if is_paused and self._is_after_pause(item):
                    is_paused = False
                    delay = (self.start_delay or 0.0) if item.kind == "allocation" else 0.0
                    yield UserRequest(max(time - delay, 0.0), JobResume(job_id=self.id))

    def _is_after_pause(self, item: HistoryItem) -> bool:
        """Whether the job had paused before: members that are asked to pause may switch once more."""
        return any(earlier.kind == "paused" for earlier in self.items[: self.items.index(item)])


def _seconds_by_workers(items: Sequence[HistoryItem]) -> dict[int, float]:
    """Return what an iteration took, by number of workers, as far as was recorded."""
    seconds: defaultdict[int, float] = defaultdict(float)
    iterations: defaultdict[int, int] = defaultdict(int)
    for begin, end in itertools.pairwise(item for item in items if item.kind in _EXACT):
        num, duration = end.iteration - begin.iteration, (end.time - begin.time).total_seconds()
        if begin.kind == "allocation" and begin.workers > 0 and num > 0 and duration > 0:
            seconds[begin.workers] += duration
            iterations[begin.workers] += num
    return {workers: seconds[workers] / iterations[workers] for workers in sorted(seconds)}


def _after(start: datetime, item: HistoryItem) -> float:
    return (item.time - start).total_seconds()


# tenants and hosts


def _tenant_request(event: TenantEvent, start: datetime) -> UserRequest:
    share, tenant = event.share, event.tenant
    request = TenantSet(tenant_id=tenant, weight=share.weight, quota=share.quota, cap=share.cap) if share else None
    time = max((event.time - start).total_seconds(), 0.0)
    return UserRequest(time, request or TenantDelete(tenant_id=tenant))


def _host_changes(events: Iterable[HostEvent], start: datetime) -> Iterator[HostChange]:
    for event in events:
        state = _STATES.get(type(event))
        if state is not None:
            slots, labels = (len(event.slots), event.labels) if isinstance(event, HostJoined) else (0, {})
            yield HostChange((event.time - start).total_seconds(), event.host, state, slots, labels)


def _unannounced(events: Iterable[HostEvent], jobs: Iterable[_RecordedJob]) -> Iterator[HostChange]:
    """Yield the hosts that were there before the history begins, with the slots that jobs had on them."""
    announced = {event.host for event in events if isinstance(event, HostJoined)}
    slots: defaultdict[str, int] = defaultdict(int)
    for name in (slot for job in jobs for item in job.items for slot in item.slots):
        host, _, number = name.rpartition("/")
        slots[host] = max(slots[host], int(number) + 1)
    for host in sorted(slots.keys() - announced):
        yield HostChange(0.0, host, HostState.UP, slots[host])
