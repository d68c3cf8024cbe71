"""What was submitted, what became of it, and the events that are made from a job's history."""

from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import to_json

from ..requirements import MAX_REQUIREMENT, MAX_REQUIREMENTS, parse_requirement
from .allocations import Loss
from .datasets import MAX_DATASETS, Dataset
from .hosts import DeviceClass
from .message import MAX_INTEGER, MAX_SLOTS, CommandId, Count, Id, Key, Line, Message, Positive, SlotName, Text, Time
from .reports import CheckpointSaved, Completed, Ready
from .services import Service
from .usage import SlotUsage

DEFAULT_PRIORITY = 5000
MAX_PRIORITY = 1_000_000
MAX_WORKERS = MAX_SLOTS
Workers = Annotated[int, Field(ge=1, le=MAX_WORKERS)]
MAX_SIZES = 64
"""The maximum number of sizes (allowed numbers of workers) of one job."""
MAX_NAME = 200
MAX_SPEC_BYTES = 256 << 10
"""The maximum size of the arguments, environment variables, requirements, data and mounts of a job, as JSON."""
Requirement = Annotated[str, Field(max_length=MAX_REQUIREMENT), AfterValidator(parse_requirement)]
Mount = Annotated[Line, Field(max_length=1000, pattern=r"^/", description="an absolute path")]
MAX_UNPUBLISHED = 64
MAX_WARNINGS = 20
"""The maximum number of warnings in the history of one job."""
MAX_COMMANDS = 64


class Intent(StrEnum):
    """What the scheduler wants of a job that holds workers."""

    TRAIN = "training"
    PAUSE = "pausing"  # until a user resumes it
    SUSPEND = "suspending"  # until there are slots for it again


class JobState(StrEnum):
    """The states of a job. The scheduler's table says which may follow which."""

    ACCEPTED = "accepted"
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    RESCALING = "rescaling"
    RECOVERING = "recovering"
    PAUSED = "paused"
    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def is_final(self) -> bool:
        """Whether nothing follows."""
        return self in (JobState.COMPLETED, JobState.FAILED, JobState.STOPPED)


class JobSpec(Message):
    """What a user submits."""

    name: Line = Field(min_length=1, max_length=MAX_NAME)
    package: Key = Field(min_length=1, description="key in object storage of the packed folder of code")
    script: Key = Field(min_length=1, description="path of the script inside the package")
    args: tuple[str, ...] = Field(default=(), max_length=10_000)
    env: dict[str, str] = Field(default_factory=dict, max_length=10_000)
    requirements: tuple[Requirement, ...] = Field(
        default=(), max_length=MAX_REQUIREMENTS, description="packages that it needs besides the pool's, as for pip"
    )
    data: tuple[Dataset, ...] = Field(
        default=(), max_length=MAX_DATASETS, description="data that its hosts fetch before its workers start"
    )
    mounts: tuple[Mount, ...] = Field(
        default=(), max_length=MAX_DATASETS, description="paths that must exist on its hosts"
    )
    min_workers: Workers = 1
    max_workers: Workers = MAX_WORKERS
    sizes: tuple[Workers, ...] = Field(
        default=(), max_length=MAX_SIZES, description="allowed numbers of workers, in ascending order; empty: any"
    )
    deadline: Time | None = Field(
        default=None, description="when it should be complete: a wish, which each policy treats in its own way"
    )
    priority: int = Field(default=DEFAULT_PRIORITY, ge=1, le=MAX_PRIORITY)
    tenant: Id = "default"
    placement: Literal["pack", "spread"] = Field(
        default="pack", description="'pack': on as few hosts as possible, near each other; 'spread': on many"
    )
    group: Line = Field(
        default="",
        max_length=1000,
        description="labels that a host must have, as in 'gpu=h200,zone=a'; empty: any host",
    )

    gang: bool = Field(
        default=False,
        description="its workers run one script that knows nothing of Resile, as torchrun would start it: they start "
        "at once, and their number never changes",
    )
    restartable: bool = Field(
        default=False, description="of a gang: it may be ended and started again, since its script saves what it needs"
    )

    service: Service | None = Field(
        default=None,
        exclude_if=lambda service: service is None,
        description="its workers are replicas of a class, and answer requests",
    )

    @property
    def has_default_size(self) -> bool:
        """Whether no maximum was given: then it is the job's number of shards."""
        return self.max_workers == MAX_WORKERS and not (self.gang or self.service)

    @model_validator(mode="after")
    def _is_a_gang(self) -> Self:
        if self.gang and (self.min_workers != self.max_workers or self.sizes):
            raise ValueError("gang: min_workers and max_workers must be the same number, and sizes empty")
        if self.gang and self.service:
            raise ValueError("service: a gang cannot be a service")
        if self.restartable and not self.gang:
            raise ValueError("restartable: only for gang jobs; other jobs recover by themselves")
        return self

    @model_validator(mode="after")
    def _has_data_of_different_names(self) -> Self:
        names = [dataset.name for dataset in self.data]
        if len(set(names)) < len(names):
            raise ValueError("data: two datasets have the same name: name each once")
        return self

    @model_validator(mode="after")
    def _fits(self) -> Self:
        num_bytes = len(to_json((self.args, self.env, self.requirements, self.data, self.mounts)))
        if num_bytes > MAX_SPEC_BYTES:
            raise ValueError(
                f"args, env, requirements, data and mounts have {num_bytes} bytes, and at most {MAX_SPEC_BYTES} are "
                "possible: put data into a file of the package"
            )
        return self

    @model_validator(mode="after")
    def _names_labels(self) -> Self:
        for part in filter(None, self.group.split(",")):
            name, _, value = (text.strip() for text in part.partition("="))
            if not (name and value):
                raise ValueError(f"group: {part.strip()!r} is not a label: give name and value, as in gpu=h200,zone=a")
        return self

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        if self.min_workers > self.max_workers:
            raise ValueError(
                f"min_workers {self.min_workers} is above max_workers {self.max_workers}: lower one or raise the other"
            )
        return self

    @model_validator(mode="after")
    def _has_an_allowed_size(self) -> Self:
        if any(after <= before for before, after in pairwise(self.sizes)):
            raise ValueError("sizes must be in increasing order without duplicates, as in 1,2,4,8")
        if self.sizes and not any(self.min_workers <= size <= self.max_workers for size in self.sizes):
            limits = f"from min_workers {self.min_workers} to max_workers {self.max_workers}"
            raise ValueError(f"no size of {', '.join(map(str, self.sizes))} is {limits}: add one, or change these")
        return self


class HistoryItem(Message):
    """One change of a job; numbers start at 1 and have no gaps."""

    number: Positive
    time: Time
    kind: Id = Field(description="'allocation', 'priority', or the state that was entered")
    generation: Count
    workers: Count
    slots: tuple[SlotName, ...] = Field(default=(), max_length=MAX_WORKERS)
    iteration: Count
    reason: Text = ""
    batch_size: Positive | None = Field(
        default=None,
        exclude_if=lambda batch_size: batch_size is None,
        description="the global batch of the generation, if its allocation names one",
    )
    loss: Loss | None = Field(
        default=None,
        exclude_if=lambda loss: loss is None,
        description="the loss of members that the change is the response to",
    )


class FailureCounts(Message):
    """Failures that count against a job, as long as it comes no further than ``iteration``."""

    iteration: int = Field(default=-1, ge=-1, le=MAX_INTEGER)
    recoveries: Count = Field(default=0, description="recoveries that a failure of workers called for")
    script_errors: Count = Field(default=0, description="errors that the script itself raised")
    workers: tuple[Count, ...] = Field(
        default=(), max_length=MAX_WORKERS, description="workers whose failures are counted here"
    )
    failed_starts: Count = Field(default=0, description="starts given up since it trained last")
    unlinked_starts: Count = Field(
        default=0, description="starts given up since it trained last because workers did not reach each other"
    )
    failed_joins: Count = Field(default=0, description="workers that failed to join since it grew last")
    fork_server_deaths: Count = Field(default=0, description="fork servers that died while its workers ran there")
    fork_server_died: Time | None = Field(default=None, description="when the last of them died")


class JobRecord(Message):
    """What a new scheduler needs of a job. Each change is one compare-and-set.

    The history is on the event stream: items are stored in ``unpublished`` first, in the same write as what they tell
    of, and leave it with a later write once they are published.
    """

    job: Id
    spec: JobSpec
    state: JobState
    priority: int = Field(ge=1, le=MAX_PRIORITY)
    submitted: Time
    generation: Count = Field(default=0, description="the newest generation that took effect")
    lineage: Count = Field(default=0, description="the newest cold start that was ordered; 0: none was")
    next_worker: Count = Field(default=0, description="worker ids below this were used")
    num_items: Count = Field(default=0, description="of the history: the number of its newest item")
    unpublished: tuple[HistoryItem, ...] = Field(default=(), max_length=MAX_UNPUBLISHED)
    kind: str = Field(default="", max_length=64, description="of the history item that gave ``reason``")
    reason: Text = Field(
        default="", description="why it is in its state, by its history; warnings and priorities do not put it there"
    )
    iteration: Count = Field(default=0, description="of the newest history item")
    allocation: HistoryItem | None = Field(default=None, description="the newest history item of that kind")
    intent: Intent = Intent.TRAIN
    warnings: tuple[Text, ...] = Field(default=(), max_length=MAX_WARNINGS, description="those in its history")
    spec_sha256: str = Field(
        default="",
        max_length=64,
        description="of ``spec`` as it was submitted; a record that the bus refuses is stored without its arguments",
    )
    applied_commands: tuple[CommandId, ...] = Field(
        default=(), max_length=MAX_COMMANDS, description="ids of the newest commands whose effect this record holds"
    )
    failures: FailureCounts = FailureCounts()
    usage: SlotUsage = SlotUsage()
    waiting_since: Time | None = Field(default=None, description="None: it is not waiting for slots")
    holding_since: Time | None = Field(
        default=None, description="since when it has held slots without a break; None: it holds none"
    )
    was_due: bool = Field(
        default=False, description="it had waited for so long that it was due when it got the slots that it holds"
    )
    device_class: DeviceClass = Field(
        default="", description="that on which it trained first, and stays: another one gives other bits"
    )
    ready: Ready | None = None
    checkpoint: CheckpointSaved | None = Field(default=None, description="the newest one that was reported")
    completed: Completed | None = None
    ended: Time | None = Field(default=None, description="when it entered its final state")
    is_deleted: bool = Field(default=False, description="it is being removed")
    keeps_results: bool = Field(
        default=False, description="of a job that is being removed: its model and its output stay in storage"
    )

    @model_validator(mode="after")
    def _is_numbered(self) -> Self:
        first = self.num_items - len(self.unpublished) + 1
        if any(item.number != number for number, item in enumerate(self.unpublished, start=first)):
            raise ValueError("unpublished items must be numbered without a gap up to the last of the history")
        return self


class JobNumber(Message):
    """The highest number of a job that was removed: numbers never come again."""

    number: Count


class JobEvent(Message):
    """One item of a job's history, published, with what a replay of the history needs to know of the job."""

    job: Id
    name: str = Field(max_length=MAX_NAME)
    tenant: Id
    state: JobState
    priority: int = Field(ge=1, le=MAX_PRIORITY)
    item: HistoryItem
    min_workers: Workers = 1
    max_workers: Workers = MAX_WORKERS
    sizes: tuple[Workers, ...] = Field(default=(), max_length=MAX_SIZES)
    group: Line = Field(default="", max_length=1000)
    num_shards: Count | None = Field(default=None, description="null before its script has reached the training call")
    iterations_total: Count | None = None
