"""A run that is resumed is the same job: its scheduler goes on where the one before it ended."""

from resile.local.job import LocalJob
from resile_learner.messages import CodeCopy
from resile_scheduler.core.core import Scheduler
from resile_scheduler.core.events import JobChangeRequested, StateRestored, StoreJob, WriteAllocation
from resile_scheduler.policies.plan import PlanPolicy, PlanStep
from resile_shared.messages.allocations import Allocation
from resile_shared.messages.commands import JobResume
from resile_shared.messages.hosts import Heartbeat, HostRecord, HostState, Slot
from resile_shared.messages.jobs import JobRecord, JobSpec, JobState
from resile_shared.messages.message import at
from resile_shared.messages.reports import CheckpointSaved
from resile_shared.version import VERSION

JOB = LocalJob(
    id="train-1",
    name="train",
    script="/train.py",
    args=(),
    code=CodeCopy(folder="/", copied_to="/copy"),
    storage="file:///storage",
    requirements=(),
    data=(),
    batches=(),
)
POLICY = PlanPolicy((PlanStep(0, 1),))
HOST = HostRecord(
    host="host-1",
    incarnation=1,
    state=HostState.UP,
    address="h",
    slots=(Slot(index=0),),
    device_class="cpu",
    version=VERSION,
    since=at(0.0),
)


def stored(**changes: object) -> JobRecord:
    spec = JobSpec(name="train", package="/", script="/train.py")
    record = JobRecord(job=JOB.id, spec=spec, state=JobState.RUNNING, priority=5000, submitted=at(0.0))
    return record.model_copy(update={"generation": 4, "next_worker": 7, "lineage": 3, "num_items": 9, **changes})


def resumed(record: JobRecord) -> tuple[JobRecord, Allocation]:
    """Return the record and the allocation of a job that a run resumes which journaled ``record``."""
    scheduler = Scheduler(secret="s", policy=POLICY)
    before = Allocation(job=JOB.id, epoch=1, generation=4, placements=(), secret="")
    events = [
        StateRestored((JOB.paused(record, POLICY),), (before,), (HOST,)),
        Heartbeat(host="host-1", incarnation=1, number=1),
        JobChangeRequested("resume", JobResume(job_id=JOB.id)),
    ]
    commands = [command for event in events for command in scheduler.handle(event, now=1000.0)]
    newest = [command.record for command in commands if isinstance(command, StoreJob)][-1]
    return newest, [command.allocation for command in commands if isinstance(command, WriteAllocation)][-1]


def test_a_resumed_run_begins_a_lineage_of_its_own_and_uses_no_id_of_a_worker_again() -> None:
    record, allocation = resumed(stored())
    assert (allocation.cold_start, allocation.resume, allocation.lineage, allocation.generation) == (True, True, 4, 5)
    assert [placement.worker for placement in allocation.placements] == [7]
    assert record.next_worker == 8


def test_a_resumed_run_looks_for_a_checkpoint_though_no_start_of_it_was_journaled() -> None:
    _, allocation = resumed(stored(lineage=0))
    assert allocation.resume


def test_a_resumed_run_knows_its_newest_checkpoint_before_it_trains() -> None:
    checkpoint = CheckpointSaved(lineage=3, iteration=40, num_bytes=1)
    record, _ = resumed(stored(checkpoint=checkpoint))
    assert record.checkpoint == checkpoint
