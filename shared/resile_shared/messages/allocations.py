"""The workers that each job is assigned: the scheduler decides, and agents follow nothing else."""

from typing import Self

from pydantic import Field, model_validator

from .hosts import Address
from .message import MAX_SLOTS, Count, Id, Index, Message, Positive, Text


class Placement(Message):
    """One worker of a generation, and the slot it runs on."""

    worker: Count = Field(description="never used again within its job; joiners have higher ids")
    host: Id
    incarnation: Positive
    slot: Index
    address: Address | None = Field(default=None, description="where peers reach it; unknown until it listens")

    @property
    def slot_name(self) -> str:
        """``<host>/<index>``."""
        return f"{self.host}/{self.slot}"


class Loss(Message):
    """A loss of members that a job responds to: the survivors continue, or the job starts again."""

    reason: Text = Field(description="what was lost, and why")
    host: Id | None = Field(default=None, description="the first host that was lost; null: only workers were")
    restart: Text = Field(
        default="", description="from where the job starts again if no worker is left; empty: it does not"
    )


class StoredCheckpoint(Message):
    """A checkpoint that a job has reported as stored."""

    lineage: Positive
    iteration: Count


class Allocation(Message):
    """The membership that a job shall have. No placements: all its workers end.

    Ordered by (epoch, generation): who has seen a newer one ignores an older one. Agents start the workers they do not
    have; once every placement has its address the generation can be formed.
    """

    job: Id
    epoch: Positive = Field(description="of the scheduler that wrote this")
    generation: Positive
    placements: tuple[Placement, ...] = Field(max_length=MAX_SLOTS, description="in rank order")
    secret: str = Field(max_length=64, repr=False, description="proves membership of this generation on worker links")
    lineage: Positive = Field(
        default=1, description="the number of the cold start that it descends from; later ones are higher"
    )
    cold_start: bool = Field(default=False, description="its members start without a hand-over")
    resume: bool = Field(
        default=False, description="a cold start that is not the job's first: it looks for a checkpoint in storage"
    )
    checkpoint: StoredCheckpoint | None = Field(
        default=None,
        exclude_if=lambda checkpoint: checkpoint is None,
        description="of a cold start that looks for a checkpoint: the newest that was reported, so that storage "
        "without it is not taken for that of a job that has none",
    )
    is_recovery: bool = Field(
        default=False,
        description="its members abandoned a round: those that are behind take the state of one that is furthest "
        "ahead, and they continue without the others",
    )
    not_before: Count = Field(default=0, description="the first iteration that this generation may train")
    until: Count | None = Field(default=None, description="the iteration at which members wait for the next one")
    batch_size: Positive | None = Field(
        default=None,
        description="the global batch of every iteration of this generation; null: that of the last committed "
        "iteration, at first that of the training call",
    )
    gang: bool = Field(
        default=False,
        exclude_if=lambda gang: not gang,
        description="its workers run one script that knows nothing of Resile, as torchrun would start it",
    )
    reason: Text = ""
    loss: Loss | None = Field(
        default=None, exclude_if=lambda loss: loss is None, description="the loss that a recovery responds to"
    )

    @property
    def has_addresses(self) -> bool:
        """Whether every placement has its address, so that the generation can be ordered."""
        return all(placement.address for placement in self.placements)

    @model_validator(mode="after")
    def _is_a_membership(self) -> Self:
        if len({placement.worker for placement in self.placements}) < len(self.placements):
            raise ValueError("a worker is placed twice")
        if len({placement.slot_name for placement in self.placements}) < len(self.placements):
            raise ValueError("a slot is given to two workers")
        return self
