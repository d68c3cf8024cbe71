from datetime import UTC, datetime

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from resile_shared.messages.allocations import Allocation, Placement
from resile_shared.messages.hosts import Address
from resile_shared.messages.jobs import HistoryItem, JobRecord, JobSpec
from resile_shared.messages.message import at, timestamp
from resile_shared.messages.reports import BatchRange, Measurement, Progress

from .examples import item, record


def test_a_history_item_reads_as_the_command_line_shows_it() -> None:
    shown = {
        "number": 7,
        "time": "2026-01-02T03:04:05.678Z",
        "kind": "allocation",
        "generation": 3,
        "workers": 4,
        "slots": ["host-1/0"],
        "iteration": 120,
        "reason": "fair share with job-2",
    }
    assert orjson.loads(HistoryItem.model_validate(shown).model_dump_json()) == shown


def test_a_history_item_says_the_batch_only_where_the_allocation_says_one() -> None:
    assert "batch_size" not in orjson.loads(item(1).model_dump_json())
    changed = item(2).model_copy(update={"batch_size": 128})
    assert HistoryItem.model_validate_json(changed.model_dump_json()) == changed


def test_what_workers_measure_has_no_number_that_is_infinite_or_negative() -> None:
    measured = {"workers": 2, "hosts": 1, "batch_size": 64, "iterations": 3, "compute_seconds": 0.1}
    assert Measurement.model_validate(measured | {"exchange_seconds": 0.0}).iterations == 3
    for seconds in (-0.1, float("inf"), float("nan")):
        with pytest.raises(ValidationError):
            Measurement.model_validate(measured | {"exchange_seconds": seconds})
        with pytest.raises(ValidationError):
            Progress(iteration=1, epoch=0, noise_scale=seconds)
    with pytest.raises(ValidationError, match="the smallest batch, 128, is larger than the largest, 64"):
        BatchRange(least=128, most=64)


@given(st.datetimes(datetime(1990, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)))
def test_a_time_equals_itself_after_a_journey(time: datetime) -> None:
    sent = record().model_copy(update={"submitted": at(time.timestamp())})
    assert JobRecord.model_validate_json(sent.model_dump_json()) == sent
    assert timestamp(sent.submitted).endswith("Z")


def test_history_without_gaps_is_the_only_history() -> None:
    with pytest.raises(ValidationError, match="numbered"):
        JobRecord.model_validate(record(num_items=3).model_dump() | {"unpublished": (item(1), item(3))})


def test_a_job_whose_minimum_is_above_its_maximum_says_so() -> None:
    with pytest.raises(ValidationError, match="min_workers 4 is above max_workers 2"):
        JobSpec(name="a", package="p", script="s.py", min_workers=4, max_workers=2)


def test_allowed_sizes_rise_and_one_is_within_the_limits() -> None:
    assert JobSpec(name="a", package="p", script="s.py", sizes=(1, 2, 4)).sizes == (1, 2, 4)
    with pytest.raises(ValidationError, match=r"sizes must be in increasing order without duplicates, as in 1,2,4,8"):
        JobSpec(name="a", package="p", script="s.py", sizes=(2, 1))
    with pytest.raises(ValidationError, match=r"no size of 1, 2 is from min_workers 3 to max_workers 10000"):
        JobSpec(name="a", package="p", script="s.py", sizes=(1, 2), min_workers=3)


def test_an_allocation_holds_no_slot_and_no_worker_twice() -> None:
    def place(worker: int, slot: int) -> Placement:
        return Placement(worker=worker, host="host-1", incarnation=1, slot=slot)

    def allocate(*placements: Placement) -> Allocation:
        return Allocation(job="job-1", epoch=1, generation=1, placements=placements, secret="s")

    with pytest.raises(ValidationError, match="slot is given to two"):
        allocate(place(0, 0), place(1, 0))
    with pytest.raises(ValidationError, match="placed twice"):
        allocate(place(0, 0), place(0, 1))
    assert not allocate(place(0, 0)).has_addresses
    assert allocate(place(0, 0).model_copy(update={"address": Address(host="::1", port=1)})).has_addresses
    assert "secret" not in repr(allocate())


@pytest.mark.parametrize("job", ["", "a.b", "a b", "*", ">", "a/b", "x" * 65, "ü", "a\n"])
def test_ids_that_would_change_a_subject_are_refused(job: str) -> None:
    with pytest.raises(ValidationError):
        JobRecord.model_validate(record().model_dump() | {"job": job})
