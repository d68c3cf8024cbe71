"""How many slots each job held over time, thinned, as a monitor stores it: what remains when events are gone."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .message import Count, Derived, Id, Line, Message

MAX_STEPS = 2048
"""The maximum number of steps of a series: more than a day of incessant changes, finest where they are newest."""
MAX_JOB_MARKS = 100
MAX_POOL_MARKS = 1000
MAX_PRESENT = 20_000
"""The maximum number of hosts that are up, and of jobs that hold slots."""
MarkKind = Literal["submitted", "priority", "joined", "draining", "lost", "left", "policy"]


class Steps(Message):
    """A number over time: each value holds from its time to the next; 0 before the first."""

    times: tuple[Count, ...] = Field(default=(), max_length=MAX_STEPS, description="milliseconds since the epoch")
    values: tuple[Count, ...] = Field(default=(), max_length=MAX_STEPS)

    @model_validator(mode="after")
    def _has_equal_columns(self) -> Self:
        if len(self.times) != len(self.values):
            raise ValueError(f"there are {len(self.times)} times and {len(self.values)} values")
        return self


class Mark(Message):
    """A moment that explains what follows."""

    time: Count = Field(description="milliseconds since the epoch")
    kind: MarkKind
    about: Id = Field(description="the job, the host, or 'pool'")
    text: Annotated[Line, Field(max_length=100)] = Field(default="", description="the new priority or policy")


class JobSlots(Derived):
    """How many slots one job held. A function of the events up to ``sequence``: all monitors make the same of them."""

    held: Steps = Steps()
    marks: tuple[Mark, ...] = Field(default=(), max_length=MAX_JOB_MARKS)


class PoolSlots(Derived):
    """How many slots the pool had, and how many all jobs held, also those that were removed since.

    All events up to ``sequence`` are in what is stored of jobs, too.
    """

    newest: Count = Field(default=0, description="when the newest event was, in milliseconds since the epoch")
    hosts: Steps = Steps()
    slots: Steps = Steps()
    held: Steps = Steps()
    marks: tuple[Mark, ...] = Field(default=(), max_length=MAX_POOL_MARKS)
    present: dict[Id, Count] = Field(
        default_factory=dict, max_length=MAX_PRESENT, description="the slots of each host that is up or draining"
    )
    holding: dict[Id, Count] = Field(
        default_factory=dict, max_length=MAX_PRESENT, description="the slots of each job that holds some"
    )
