"""No sender can make a message, or a record that holds what it said, larger than the bus takes."""

from datetime import UTC, datetime, timedelta, timezone
from typing import get_args

import pytest
from pydantic import BaseModel, ValidationError

import resile_learner.messages
from resile_scheduler.executor import MAX_UNPUBLISHED_BYTES
from resile_shared.bus import catalogue
from resile_shared.bus.nats_server import MAX_PAYLOAD_BYTES
from resile_shared.bus.subjects import BUCKETS
from resile_shared.messages.allocations import Allocation
from resile_shared.messages.commands import CommandResponse, JobExplanations, JobSubmit
from resile_shared.messages.hosts import HostRecord
from resile_shared.messages.jobs import MAX_SPEC_BYTES, HistoryItem, JobEvent, JobRecord, JobSpec
from resile_shared.messages.message import MAX_DETAILS, MAX_SLOTS, MAX_TEXT, at
from resile_shared.messages.reports import MAX_COUNTS, Completed, EpochCount, Failed, Progress, Ready, Report, Warned
from resile_shared.messages.slot_history import JobSlots, PoolSlots

from .examples import record
from .largest import largest

WORKER_MESSAGES = (
    *(get_args(get_args(resile_learner.messages.FromWorker)[0])),
    *(get_args(resile_learner.messages.PeerMessage)),
)
MODELS = {
    *catalogue.COMMANDS.values(),
    *catalogue.QUERIES.values(),
    *catalogue.HOST_EVENTS.values(),
    *catalogue.OTHERS.values(),
    *(bucket.model for bucket in BUCKETS),
    *WORKER_MESSAGES,
    CommandResponse,
    JobExplanations,
}


LIMITED_TOGETHER = ("args", "env", "unpublished")
"""`JobSpec` limits its arguments and environment together, the executor the unpublished items of a record."""


@pytest.mark.parametrize("model", sorted(MODELS, key=lambda model: model.__name__))
def test_every_part_of_every_message_has_a_maximum(model: type[BaseModel]) -> None:
    largest(model, leave_out=LIMITED_TOGETHER)


@pytest.mark.parametrize("model", [JobRecord, Allocation, HostRecord, JobEvent, JobSubmit, Report, JobSlots, PoolSlots])
def test_what_is_stored_always_fits_into_a_message(model: type[BaseModel]) -> None:
    together = {JobRecord: MAX_SPEC_BYTES + MAX_UNPUBLISHED_BYTES, JobSubmit: MAX_SPEC_BYTES}.get(model, 0)
    assert largest(model, leave_out=LIMITED_TOGETHER) + together < MAX_PAYLOAD_BYTES - 10_000, "headers take some"


def test_what_is_written_for_people_is_cut_and_what_else_is_too_long_is_refused() -> None:
    assert len(Warned(message="a" * 8_000_000).message) == MAX_TEXT
    assert len(Ready.model_validate(READY | {"bits": "b" * 8_000_000}).bits) == MAX_TEXT
    failed = Failed(message="x" * 3000, details="y" * 30_000 + "the error")
    assert len(failed.details) == MAX_DETAILS
    assert failed.details.endswith("the error"), "a traceback ends with the error"
    with pytest.raises(ValidationError, match="at most 512"):
        Progress(iteration=1, epoch=0, metrics={str(number): 0.0 for number in range(513)})
    with pytest.raises(ValidationError, match="less than or equal"):
        Ready.model_validate(READY | {"samples": 1 << 64})
    count = EpochCount(epoch=0, samples=1, once=1, more=0, never=0)
    with pytest.raises(ValidationError, match=f"at most {MAX_COUNTS}"):
        Completed.model_validate({**Completed.model_fields, "ledger": (count,) * (MAX_COUNTS + 1)})


READY = {"iterations_total": 1, "num_shards": 1, "batch_size": 1, "epochs": 1, "samples": 1, "bits": "same bits"}


def test_a_submission_that_is_too_large_says_so() -> None:
    for large in (
        {"args": ("a" * 300_000,)},
        {"args": ("\0" * 50_000,)},
        {"env": {f"{n}": "v" * 100 for n in range(5000)}},
    ):
        with pytest.raises(ValidationError, match="put data into a file of the package"):
            JobSpec(name="a", package="p", script="s.py", **large)  # type: ignore[arg-type]


def test_a_time_that_no_clock_has_makes_its_message_invalid() -> None:
    late = datetime.max.replace(tzinfo=timezone(timedelta(hours=-1)))
    with pytest.raises(ValidationError, match="out of range"):
        record().model_validate(record().model_dump() | {"submitted": late})
    assert at(0.0) == datetime(1970, 1, 1, tzinfo=UTC)


def test_an_item_of_the_largest_job_takes_less_than_a_message() -> None:
    slots = tuple(f"{'h' * 64}/{number}" for number in range(MAX_SLOTS))
    item = HistoryItem(
        number=1, time=at(0.0), kind="allocation", generation=1, workers=MAX_SLOTS, slots=slots, iteration=0, reason="r"
    )
    assert len(item.model_dump_json()) < MAX_UNPUBLISHED_BYTES
