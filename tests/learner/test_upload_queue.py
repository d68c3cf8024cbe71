"""What upload threads do next follows from the calls and from how tasks went, whatever order they end in."""

from datetime import UTC, datetime

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from resile_learner.checkpoint.manifest import CheckpointId, Manifest, PartInfo
from resile_learner.checkpoint.snapshot import Snapshot
from resile_learner.checkpoint.upload_queue import (
    LATE_SECONDS,
    MAX_BACKOFF_SECONDS,
    MIN_BACKOFF_SECONDS,
    Prune,
    PutPart,
    StoreModel,
    Task,
    UploadQueue,
    Wait,
    WriteManifest,
)
from resile_learner.state.flat import flatten
from resile_shared.errors import ResileError
from resile_shared.storage.objects import StorageError

FIRST, SECOND = CheckpointId(1, 10, 1), CheckpointId(1, 20, 1)
FAILURE = StorageError("write x", "no space is left there", "free some")


def snapshot() -> Snapshot:
    return Snapshot(flatten({"w": torch.ones(100)}), part_bytes=200)


def part(number: int) -> PartInfo:
    return PartInfo(number=number, num_bytes=9, sha256="0" * 64)


def result_of(task: Task) -> PartInfo | Manifest | None:
    match task:
        case PutPart(_, number):
            return part(number)
        case WriteManifest(upload, parts):
            return Manifest.of(upload.checkpoint, job="j", parts=parts, created=datetime(2026, 1, 1, tzinfo=UTC))
        case _:
            return None


def take(queue: UploadQueue, now: float = 0.0) -> Task:
    task = queue.take(now=now)
    assert not isinstance(task, Wait)
    return task


def test_each_task_is_given_out_once_and_stays_wanted_until_it_is_done() -> None:
    queue = UploadQueue()
    queue.start(snapshot(), FIRST)
    queue.assign([1, 0])
    tasks = [take(queue), take(queue)]
    assert [task.number for task in tasks if isinstance(task, PutPart)] == [0, 1]
    assert queue.take(now=0.0) == Wait(None)
    queue.done(tasks[1], part(1), now=0.0)
    queue.done(tasks[0], FAILURE, now=0.0)
    assert queue.stored() == [(FIRST.name, part(1))]
    assert take(queue, now=MIN_BACKOFF_SECONDS) == tasks[0]


def test_the_wait_after_a_failure_doubles_and_ends_with_the_first_success() -> None:
    queue = UploadQueue()
    queue.start(snapshot(), FIRST)
    queue.assign([0, 1])
    now, waits = 0.0, []
    for _ in range(7):
        queue.done(take(queue, now), FAILURE, now=now)
        wait = queue.take(now=now)
        assert isinstance(wait, Wait)
        assert wait.seconds is not None
        assert queue.failure is FAILURE
        waits.append(wait.seconds)
        now += wait.seconds
    assert waits == pytest.approx([0.5, 1.0, 2.0, 4.0, 8.0, MAX_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS])
    queue.done(take(queue, now), part(0), now=now)
    assert queue.failure is None
    queue.done(take(queue, now), FAILURE, now=now)
    assert queue.take(now=now) == Wait(MIN_BACKOFF_SECONDS)


def test_a_request_without_an_answer_is_a_fault_until_it_is_answered() -> None:
    queue = UploadQueue()
    assert queue.fault(now=LATE_SECONDS) is None
    queue.start(snapshot(), FIRST)
    queue.assign([0, 1])
    tasks = [take(queue, 10.0), take(queue, 60.0)]
    assert queue.fault(now=10.0 + LATE_SECONDS - 1.0) is None
    fault = queue.fault(now=10.0 + LATE_SECONDS)
    assert fault is not None
    assert fault.reason == "no answer for more than 60 s"
    queue.done(tasks[0], part(0), now=71.0)
    assert queue.fault(now=71.0) is None
    queue.done(tasks[1], FAILURE, now=72.0)
    assert queue.fault(now=72.0) is FAILURE


def test_a_manifest_is_followed_by_pruning_which_is_tried_again_until_it_succeeds() -> None:
    queue = UploadQueue()
    queue.start(snapshot(), FIRST)
    queue.commit([part(0)])
    write = take(queue)
    assert isinstance(write, WriteManifest)
    queue.done(write, result_of(write), now=0.0)
    assert [manifest.checkpoint for manifest in queue.committed()] == [FIRST]
    prune = take(queue)
    assert prune == Prune(lineage=1)
    queue.done(prune, FAILURE, now=0.0)
    assert take(queue, now=1.0) == prune
    queue.done(prune, None, now=1.0)
    assert queue.take(now=1.0) == Wait(None)


def test_a_snapshot_is_released_when_nothing_reads_it_any_more() -> None:
    queue, taken = UploadQueue(), snapshot()
    queue.start(taken, FIRST)
    queue.assign([0])
    task = take(queue)
    queue.finish(FIRST)
    assert not taken.free
    queue.done(task, part(0), now=0.0)
    assert taken.free
    assert queue.stored() == [], "it is not wanted any more"


def test_an_error_that_is_not_the_storages_stops_everything() -> None:
    queue, error = UploadQueue(), ResileError("members have different bytes")
    queue.start(snapshot(), FIRST)
    queue.assign([0, 1])
    queue.done(take(queue), error, now=0.0)
    assert queue.error is error
    assert queue.take(now=0.0) == Wait(None)


def test_the_end_waits_for_what_is_wanted_but_not_for_a_storage_that_fails() -> None:
    queue = UploadQueue()
    queue.store_model({}, "models/lineage-1.safetensors")
    queue.close(wait=True)
    assert not queue.has_ended
    task = take(queue)
    assert isinstance(task, StoreModel)
    queue.done(task, FAILURE, now=0.0)
    assert queue.has_ended
    queue.done(take(queue, now=9.0), None, now=9.0)
    assert queue.has_stored_model


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=60, max_size=60), st.booleans())
def test_all_that_is_wanted_is_done_once_the_storage_works(steps: list[tuple[int, bool]], replaced: bool) -> None:
    queue, now = UploadQueue(), 0.0
    first, second = snapshot(), snapshot()
    queue.start(first, FIRST)
    queue.assign(range(first.num_parts))
    running: list[Task] = []
    stored: dict[tuple[str, int], int] = {}
    for choice, fails in [*steps, *[(0, False)] * 20]:
        now += MAX_BACKOFF_SECONDS
        while len(running) < 4 and not isinstance(task := queue.take(now=now), Wait):
            assert task not in running
            running.append(task)
        if running:
            task = running.pop(choice % len(running))
            queue.done(task, FAILURE if fails else result_of(task), now=now)
        for name, info in queue.stored():
            stored[name, info.number] = stored.get((name, info.number), 0) + 1
        if replaced and choice == 9 and queue.current == FIRST:
            queue.finish(FIRST)
            queue.start(second, SECOND)
            queue.assign(range(second.num_parts))
    current = queue.current
    assert current is not None
    expected = {(current.name, number) for number in range(first.num_parts)}
    assert {key for key in stored if key[0] == current.name} == expected
    assert set(stored.values()) == {1}
    assert first.free == (current == SECOND)
