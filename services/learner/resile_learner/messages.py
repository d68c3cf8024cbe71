"""What an agent and its workers say to each other over their local socket: one JSON object a line.

Both ends are ours, but a worker's process also runs the user's code, so everything read is validated.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter


class Message(BaseModel):
    """Base of all messages: frozen, and strict about unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Member(Message):
    """One worker of a generation and where its peers reach it."""

    worker: int = Field(ge=0, description="id of the worker, never used again within its job; joiners have higher ids")
    host: str
    port: int = Field(gt=0, lt=65536)


class Order(Message):
    """The membership that the job shall have: the scheduler's word, valid until a newer generation is ordered.

    A worker that an order drops is never named by a later one.
    """

    kind: Literal["order"] = "order"
    job: str
    generation: int = Field(ge=1)
    members: tuple[Member, ...] = Field(min_length=1, description="in rank order")
    secret: str = Field(description="proves membership of this generation on worker links")
    founding: bool = Field(
        default=False, description="the first generation of a run: its members start without a hand-over"
    )
    not_before: int = Field(default=0, ge=0, description="the first iteration this generation may train")
    until: int | None = Field(default=None, description="the iteration at which members wait for the next generation")

    @property
    def workers(self) -> tuple[int, ...]:
        """Worker ids in rank order."""
        return tuple(member.worker for member in self.members)


class Stop(Message):
    """Ends the run: the worker leaves at once."""

    kind: Literal["stop"] = "stop"


class Hello(Message):
    """A worker's first words: where its peers reach it. Sent before the user's script runs."""

    kind: Literal["hello"] = "hello"
    worker: int
    host: str
    port: int


class Ready(Message):
    """The script has reached its training call; the worker can become a member."""

    kind: Literal["ready"] = "ready"
    worker: int
    iterations_total: int
    num_shards: int
    batch_size: int
    epochs: int
    samples: int
    bits: str = Field(description="'same bits', 'fast', or 'bits not guaranteed: <operation>'")


class Switched(Message):
    """A generation took effect. Sent by its lowest rank; ``iteration`` is the first that it trains."""

    kind: Literal["switched"] = "switched"
    worker: int
    generation: int
    workers: tuple[int, ...]
    iteration: int
    pause_seconds: float = Field(
        default=0.0, description="from the last exchange of the old to the first work of the new"
    )


class Progress(Message):
    """What the lowest rank has committed; sent a few times a second at most, and at each change."""

    kind: Literal["progress"] = "progress"
    worker: int
    generation: int
    iteration: int
    epoch: int
    loss: float | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    validation: dict[str, float] = Field(default_factory=dict)
    iteration_seconds: float = 0.0
    samples_seen: int = 0
    ends_epoch: bool = Field(default=False, description="the epoch is complete, its validation included")


class CheckpointSaved(Message):
    """A checkpoint's manifest is stored: from now on the job can resume from it."""

    kind: Literal["checkpoint"] = "checkpoint"
    worker: int
    iteration: int
    generation: int
    num_bytes: int


class Warned(Message):
    """Something the user should know; the run goes on."""

    kind: Literal["warned"] = "warned"
    worker: int
    message: str


class EpochCount(Message):
    """How often the samples of one epoch were used by committed iterations."""

    epoch: int
    samples: int
    once: int
    more: int
    never: int


class Completed(Message):
    """Training ended as asked. Sent by the lowest rank once the final model is stored."""

    kind: Literal["completed"] = "completed"
    worker: int
    generation: int
    iteration: int
    epoch: int
    samples_seen: int
    loss: float | None
    metrics: dict[str, float]
    validation: dict[str, float]
    params_sha256: str
    model: str | None = Field(description="key of the final safetensors file in the run's storage")
    ledger: tuple[EpochCount, ...]
    bits: str


class Finished(Message):
    """A member's part is over: its script came to its end after training was complete. Its last words."""

    kind: Literal["finished"] = "finished"
    worker: int


class Left(Message):
    """A leaver has let go: every peer confirmed its last iteration. Its slot is free once the process is gone."""

    kind: Literal["left"] = "left"
    worker: int
    generation: int
    iteration: int


class Failed(Message):
    """The worker cannot go on. ``message`` is one line for the user, ``details`` the traceback where there is one."""

    kind: Literal["failed"] = "failed"
    worker: int
    message: str
    details: str = ""


ToWorker = Annotated[Order | Stop, Field(discriminator="kind")]
FromWorker = Annotated[
    Hello | Ready | Switched | Progress | CheckpointSaved | Warned | Completed | Finished | Left | Failed,
    Field(discriminator="kind"),
]
to_worker: TypeAdapter[Order | Stop] = TypeAdapter(ToWorker)
from_worker: TypeAdapter[
    Hello | Ready | Switched | Progress | CheckpointSaved | Warned | Completed | Finished | Left | Failed
] = TypeAdapter(FromWorker)


class WorkerConfig(Message):
    """All that a worker is told when it is forked."""

    job: str
    worker: int
    script: str = Field(description="absolute path of the user's script")
    args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    directory: str = Field(description="working directory of the script")
    host: str = Field(default="127.0.0.1", description="address on which peers reach this worker")
    storage: str = Field(description="URL of the run's folder in object storage, e.g. file:///...")
    resume: bool = Field(default=False, description="founders load the newest complete checkpoint")


def encode(message: Message) -> bytes:
    """One line of the socket."""
    return message.model_dump_json().encode() + b"\n"


class Announcement(Message):
    """Worker to worker: a joiner is ready and linked to all members of ``generation``."""

    kind: Literal["announcement"] = "announcement"
    generation: int


class InForce(Message):
    """Worker to worker: the receiver's order was superseded; ``generation`` is current."""

    kind: Literal["in_force"] = "in_force"
    generation: int


from_peer: TypeAdapter[Order | Announcement | InForce] = TypeAdapter(
    Annotated[Order | Announcement | InForce, Field(discriminator="kind")]
)
