"""What the scheduler tells an agent beside the allocations: never stored, but repeated until it is seen to be done."""

from typing import Annotated, Literal

from pydantic import Field, RootModel

from .hosts import MAX_SLOTS_OF_HOST
from .message import MAX_SLOTS, Count, Id, Message, Positive


class StopWorkers(Message):
    """End these workers at once. Those that the agent does not have it reports as ``gone``, ``not started``."""

    kind: Literal["stop"] = "stop"
    epoch: Positive = Field(description="of the scheduler; an agent that has heard of a later one ignores it")
    job: Id
    incarnation: Positive = Field(description="an agent of another incarnation ignores it")
    workers: tuple[Count, ...] = Field(max_length=MAX_SLOTS)


class PauseWorkers(Message):
    """Tell the members of ``lineage`` to save a checkpoint at the next boundary, and to go no further."""

    kind: Literal["pause"] = "pause"
    epoch: Positive = Field(description="of the scheduler; an agent that has heard of a later one ignores it")
    job: Id
    lineage: Positive


class AssignJobs(Message):
    """These jobs have workers on the host, or will have: watch their allocations, and those of no other job.

    Build the environments of ``environments`` before their workers are placed, in this order, and of no other job.
    Heartbeats name the jobs that were assigned last.
    """

    kind: Literal["assign"] = "assign"
    epoch: Positive = Field(description="of the scheduler; an agent that has heard of a later one ignores it")
    incarnation: Positive = Field(description="an agent of another incarnation ignores it")
    jobs: tuple[Id, ...] = Field(max_length=MAX_SLOTS_OF_HOST)
    environments: tuple[Id, ...] = Field(
        default=(), max_length=MAX_SLOTS_OF_HOST, description="the jobs whose environments the host must have"
    )


class SendHeartbeat(Message):
    """Send a heartbeat at once: somebody accuses a worker of this host."""

    kind: Literal["beat"] = "beat"
    incarnation: Positive = Field(description="an agent of another incarnation ignores it")


class Instruction(
    RootModel[Annotated[AssignJobs | StopWorkers | PauseWorkers | SendHeartbeat, Field(discriminator="kind")]]
):
    """One instruction to one host's agent."""
