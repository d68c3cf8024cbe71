"""What was submitted, what became of it, and the events that are made from a job's history."""

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from .message import Id, Message, SlotName, Time
from .reports import CheckpointSaved, Completed, Ready

DEFAULT_PRIORITY = 5000
MAX_PRIORITY = 1_000_000
MAX_WORKERS = 10_000


class JobState(StrEnum):
    """The states of a job; which may follow which is the scheduler's table."""

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
    """What a user asks for."""

    name: str = Field(min_length=1, max_length=200)
    package: str = Field(min_length=1, description="key in object storage of the packed folder of code")
    script: str = Field(min_length=1, description="path of the script inside the package")
    args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    min_workers: int = Field(default=1, ge=1, le=MAX_WORKERS)
    max_workers: int = Field(default=MAX_WORKERS, ge=1, le=MAX_WORKERS)
    priority: int = Field(default=DEFAULT_PRIORITY, ge=1, le=MAX_PRIORITY)
    tenant: Id = "default"
    group: str = Field(default="", description="labels a host must have: 'gpu=h200,zone=a'; empty: any host")

    @property
    def has_default_size(self) -> bool:
        """Whether nobody gave a maximum: then it is the job's number of shards."""
        return self.max_workers == MAX_WORKERS

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        if self.min_workers > self.max_workers:
            raise ValueError(
                f"min_workers {self.min_workers} is above max_workers {self.max_workers}: lower one or raise the other"
            )
        return self


class HistoryItem(Message):
    """One change of a job; numbers start at 1 and have no gaps."""

    number: int = Field(ge=1)
    time: Time
    kind: Id = Field(description="'allocation', 'priority', or the state that was entered")
    generation: int = Field(ge=0)
    workers: int = Field(ge=0)
    slots: tuple[SlotName, ...] = ()
    iteration: int = Field(ge=0)
    reason: str = ""


class FailureCounts(Message):
    """Failures that count against a job, as long as it comes no further than ``iteration``."""

    iteration: int = Field(default=-1, ge=-1)
    recoveries: int = Field(default=0, ge=0, description="recoveries that a failure of workers called for")
    script_errors: int = Field(default=0, ge=0, description="errors that the script itself raised")
    workers: tuple[int, ...] = Field(default=(), description="workers whose failures are counted here")
    failed_starts: int = Field(default=0, ge=0, description="starts given up since it trained last")
    unlinked_starts: int = Field(
        default=0, ge=0, description="starts given up since it trained last because workers did not reach each other"
    )
    failed_joins: int = Field(default=0, ge=0, description="workers that failed to join since it grew last")
    fork_server_deaths: int = Field(default=0, ge=0, description="fork servers that died while its workers ran there")
    fork_server_died: Time | None = Field(default=None, description="when the last of them died")


class JobRecord(Message):
    """All that is stored of a job. Each change is one compare-and-set; events are published from ``history``."""

    job: Id
    spec: JobSpec
    state: JobState
    priority: int = Field(ge=1, le=MAX_PRIORITY)
    submitted: Time
    generation: int = Field(default=0, ge=0, description="the newest generation that took effect")
    lineage: int = Field(default=0, ge=0, description="the newest cold start that was ordered; 0: none was")
    next_worker: int = Field(default=0, ge=0, description="worker ids below this were used")
    history: tuple[HistoryItem, ...] = ()
    applied_commands: tuple[str, ...] = Field(
        default=(), description="ids of the commands whose effect this record holds"
    )
    failures: FailureCounts = FailureCounts()
    ready: Ready | None = None
    checkpoint: CheckpointSaved | None = Field(default=None, description="the newest one that was reported")
    completed: Completed | None = None

    @property
    def reason(self) -> str:
        """Why the job is in its state, by its history; warnings and changes of priority do not put it there."""
        kinds = ("warning", "priority")
        return next((item.reason for item in reversed(self.history) if item.kind not in kinds), "")

    @model_validator(mode="after")
    def _is_numbered(self) -> Self:
        if any(item.number != number for number, item in enumerate(self.history, start=1)):
            raise ValueError("history items must be numbered 1, 2, 3, ...")
        return self


class JobEvent(Message):
    """One item of a job's history, published. Readers drop numbers they have seen."""

    job: Id
    name: str
    tenant: Id
    state: JobState
    priority: int
    item: HistoryItem
