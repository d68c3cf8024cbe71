"""The messages between an agent and its workers, and between workers: one JSON object per line.

Both ends are ours, but a worker's process also runs the user's code, so everything read is validated. What a worker
reports is a content of `resile_shared.messages.reports` with the id of the worker; `content_of` removes the id.
"""

from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from resile_shared.messages import reports
from resile_shared.messages.allocations import StoredCheckpoint
from resile_shared.messages.jobs import MAX_WORKERS
from resile_shared.messages.message import MAX_INTEGER, Count, HostAddress, Id, Message, Port, Positive
from resile_shared.messages.services import Service
from resile_shared.messages.spans import Attributes

__all__ = ["Message"]

MAX_NUMBER = MAX_INTEGER
"""The largest worker id, generation or round: all JSON parsers read it exactly, and it fits into a frame's header."""
MAX_WORKER_SPANS = 64
"""At most this many spans are sent in one message of a worker."""
COMPAT = "RESILE_COMPAT"
"""The variable that names a module. Its ``activate(env)`` sets up the script as another platform would."""
MAX_IMPORTED = 20_000
"""At most this many modules are reported as imported by a script."""
ModuleName = Annotated[str, Field(min_length=1, max_length=200)]
WorkerId = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
Generation = Annotated[int, Field(ge=1, le=MAX_NUMBER)]


class Member(Message):
    """One worker of a generation and where its peers reach it."""

    worker: WorkerId = Field(description="id of the worker, never used again within its job; joiners have higher ids")
    host: HostAddress
    port: Port


class Order(Message):
    """The membership of a generation, as the scheduler decided; valid until a newer generation is ordered.

    A worker that an order drops is never named by a later one.
    """

    kind: Literal["order"] = "order"
    job: Id
    generation: Generation
    members: tuple[Member, ...] = Field(min_length=1, max_length=MAX_WORKERS, description="in rank order")
    secret: str = Field(max_length=256, repr=False, description="proves membership of this generation on worker links")
    lineage: int = Field(default=1, ge=1, lt=10**9, description="the number of the cold start that it descends from")
    cold_start: bool = Field(default=False, description="its members start without a hand-over")
    resume: bool = Field(default=False, description="the members of a cold start look for a checkpoint in storage")
    checkpoint: StoredCheckpoint | None = Field(
        default=None, description="the newest one that the job has reported as stored, if they look for one"
    )
    is_recovery: bool = Field(
        default=False,
        description="its members abandon the open round, synchronize their state, and continue without the others",
    )
    not_before: int = Field(default=0, ge=0, le=MAX_NUMBER, description="the first iteration this generation may train")
    until: int | None = Field(
        default=None, ge=0, le=MAX_NUMBER, description="the iteration at which members wait for the next generation"
    )
    batch_size: Positive | None = Field(
        default=None, description="the global batch of its iterations; null: that of the last committed iteration"
    )

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """Worker ids in rank order."""
        return tuple(member.worker for member in self.members)

    @cached_property
    def num_hosts(self) -> int:
        """Number of hosts that its members are on, by their addresses."""
        return len({member.host for member in self.members})

    @property
    def hosts(self) -> dict[str, tuple[int, ...]]:
        """Worker ids by the address of their host, both in rank order: those of one host could share memory."""
        hosts: dict[str, tuple[int, ...]] = {}
        for member in self.members:
            hosts[member.host] = (*hosts.get(member.host, ()), member.worker)
        return hosts


class Stop(Message):
    """Ends the run: the worker exits at once."""

    kind: Literal["stop"] = "stop"


class Pause(Message):
    """The members of ``lineage`` save a checkpoint at the next boundary and stop there."""

    kind: Literal["pause"] = "pause"
    lineage: Generation


class WorkerMessage(Message):
    """A message that names the worker that sent it."""

    worker: WorkerId


class MemberMessage(WorkerMessage):
    """A message of a member of ``generation``."""

    generation: Count


class WorkerListening(WorkerMessage):
    """A worker's first message: the address that its peers connect to. Sent before the user's script runs."""

    kind: Literal["listening"] = "listening"
    host: HostAddress
    port: Port


class Ready(WorkerMessage, reports.Ready):
    """The script has reached its training call; the worker can become a member."""


class Imported(WorkerMessage):
    """The modules that the script imported before its training call and this process lacked when it was forked.

    They are in the order of the imports. Only modules on the interpreter's own path are listed, none of the script's
    folder.
    """

    kind: Literal["imported"] = "imported"
    modules: tuple[ModuleName, ...] = Field(max_length=MAX_IMPORTED)


class Switched(MemberMessage, reports.Switched):
    """A generation took effect. Sent by its lowest rank; ``iteration`` is the first that it trains."""


class Joined(MemberMessage):
    """From every other rank: this worker is a member of ``generation``."""

    kind: Literal["joined"] = "joined"
    iteration: Count


class Progress(MemberMessage, reports.Progress):
    """What the lowest rank has committed; sent a few times a second at most, and at each change."""


class CheckpointSaved(MemberMessage, reports.CheckpointSaved):
    """A checkpoint's manifest is stored: from now on the job can resume from it."""


class Warned(WorkerMessage, reports.Warned):
    """A warning for the user; the run continues."""


class Completed(MemberMessage, reports.Completed):
    """Training ended as requested. Sent by the lowest rank once the final model is stored."""


class Trained(WorkerMessage):
    """Training is complete on this worker, and its script goes on. From here on, an exit with status 0 is orderly."""

    kind: Literal["trained"] = "trained"


class Finished(WorkerMessage):
    """The script ended after training was complete. A worker's last message."""

    kind: Literal["finished"] = "finished"


class Left(MemberMessage, reports.Left):
    """A leaver is done: every peer confirmed its last iteration. Its slot is free once the process is gone."""


class PeerSuspected(MemberMessage, reports.PeerSuspected):
    """Another member is suspected to be lost; this worker waits for a recovery order."""


class GrowthRefused(MemberMessage, reports.GrowthRefused):
    """This worker does not take part in ``generation``, which it was ordered to form."""


class Failed(WorkerMessage, reports.Failed):
    """The worker cannot continue. ``message`` is one line for the user, ``details`` the traceback if there is one."""


class WorkerSpan(Message):
    """One step of a change, as a worker saw it; times in microseconds since the epoch."""

    name: str = Field(max_length=64)
    begin: Count
    end: Count
    parent: int | None = Field(default=None, ge=0, lt=MAX_WORKER_SPANS, description="an earlier one of the message")
    attributes: Attributes = Field(default_factory=dict)


TracedChange = Literal["generation", "checkpoint", "none"]


class ChangeTraced(MemberMessage):
    """What a worker did around a change of ``generation``; used only for traces."""

    kind: Literal["traced"] = "traced"
    change: TracedChange = Field(description="'none': a sample of what it does while nothing changes")
    pausing: bool = Field(default=False, description="of a checkpoint: training is paused at it")
    spans: tuple[WorkerSpan, ...] = Field(max_length=MAX_WORKER_SPANS)


ToWorker = Annotated[Order | Stop | Pause, Field(discriminator="kind")]
ReportedByWorker = (
    Ready | Switched | Progress | CheckpointSaved | Warned | Completed | Left | PeerSuspected | GrowthRefused | Failed
)
SentByWorker = WorkerListening | Imported | Joined | Trained | Finished | ChangeTraced | ReportedByWorker
FromWorker = Annotated[SentByWorker, Field(discriminator="kind")]
to_worker: TypeAdapter[Order | Stop | Pause] = TypeAdapter(ToWorker)
from_worker: TypeAdapter[SentByWorker] = TypeAdapter(FromWorker)
_content: TypeAdapter[reports.Content] = TypeAdapter(reports.Content)


def content_of(message: ReportedByWorker) -> reports.Content:
    """Return what a worker reported, without the id of the worker."""
    return _content.validate_python(message.model_dump(exclude={"worker", "generation"}))


class GangPlace(Message):
    """A worker's place in a gang: what torchrun would tell its script."""

    rank: Count
    size: Positive
    local_rank: Count
    local_size: Positive
    local_slots: tuple[Count, ...] = Field(
        min_length=1, max_length=MAX_WORKERS, description="the slots of the gang on this host, by their local ranks"
    )


class CodeCopy(Message):
    """The Python files of a project as they were when its run began."""

    folder: str = Field(description="absolute path of the folder that was copied")
    copied_to: str = Field(description="absolute path of the folder with its copy")
    changed: tuple[str, ...] = Field(
        default=(), description="what differs from what the run began with, since it was resumed with changed code"
    )


class ReplicaConfig(Message):
    """What a replica of a service serves. Who connects to it has to know ``secret``."""

    service: Service
    secret: str = Field(min_length=32, max_length=64, repr=False)


class WorkerConfig(Message):
    """The configuration of a worker, given to it when it is forked."""

    job: str
    worker: int
    script: str = Field(description="absolute path of the user's script")
    args: tuple[str, ...] = ()
    code: CodeCopy | None = Field(default=None, description="what it runs of the script's project; null: what is there")
    env: dict[str, str] = Field(default_factory=dict)
    directory: str = Field(description="working directory of the script")
    host: str = Field(default="127.0.0.1", description="address on which peers reach this worker")
    location: tuple[str, ...] = Field(default=(), max_length=2, description="zone and rack of its host; empty: unknown")
    storage: str = Field(description="URL of the run's folder in object storage, e.g. file:///...")
    batches: tuple[reports.BatchStep, ...] = Field(
        default=(), max_length=reports.MAX_BATCH_STEPS, description="the batches of another run that this one replays"
    )
    environment: str = Field(default="", description="folder of the environment that it runs in; empty: the pool's own")
    packages: str = Field(default="", description="what that has installed over the pool's own packages")
    shared_folder: str | None = Field(
        default=None, description="folder for temporary files of all workers of its fork server; null: none"
    )
    template: int | None = Field(default=None, description="number of the template that it is forked from; null: none")
    gang: GangPlace | None = Field(
        default=None, description="the script knows nothing of Resile, and is started as torchrun would; null: it does"
    )
    replica: ReplicaConfig | None = Field(default=None, description="of a worker that serves; null: it trains")
    detection_seconds: float = Field(
        default=3.0, gt=0, description="a peer that is silent for this long is suspected to be lost"
    )


def encode(message: Message) -> bytes:
    """Encode a message as one line for the socket."""
    return message.model_dump_json().encode() + b"\n"


class Heartbeat(Message):
    """Worker to worker: the sender is alive, and ``generation`` is the newest whose order it has; 0: none."""

    kind: Literal["heartbeat"] = "heartbeat"
    generation: int = Field(ge=0, le=MAX_NUMBER)


class OrderRequest(Message):
    """Worker to worker: the sender lacks the newest order of the receiver."""

    kind: Literal["order_request"] = "order_request"


class JoinerReady(Message):
    """Worker to worker: a joiner is ready and linked to all members of ``generation``."""

    kind: Literal["joiner_ready"] = "joiner_ready"
    generation: Generation


class ActiveGeneration(Message):
    """Worker to worker: the receiver's order was superseded; ``generation`` is the current one."""

    kind: Literal["active_generation"] = "active_generation"
    generation: Generation


class CommittedRound(Message):
    """To the first rank: how far the sender's state has come, as a recovery begins ``generation``."""

    kind: Literal["committed_round"] = "committed_round"
    generation: Generation
    round: int = Field(
        ge=-1, le=MAX_NUMBER, description="all rounds before it are committed; -1: the sender has no whole state"
    )


class CommittedRounds(Message):
    """From the first rank to the others: how far the members' states have come, as a recovery begins ``generation``."""

    kind: Literal["committed_rounds"] = "committed_rounds"
    generation: Generation
    round: int = Field(ge=-1, le=MAX_NUMBER, description="the next round of those that are furthest ahead")
    behind: tuple[WorkerId, ...] = Field(max_length=MAX_WORKERS, description="the other members, in rank order")


class StoreEntry(Message):
    """Worker to worker: what the members of ``generation`` need to connect their devices, in hexadecimal digits."""

    kind: Literal["store_entry"] = "store_entry"
    generation: Generation
    key: str = Field(max_length=256)
    value: str = Field(max_length=1 << 17, pattern="^([0-9a-f]{2})*$")


MembershipMessage = Heartbeat | OrderRequest | JoinerReady | ActiveGeneration | CommittedRound | CommittedRounds
PeerMessage = Order | StoreEntry | MembershipMessage
from_peer: TypeAdapter[PeerMessage] = TypeAdapter(Annotated[PeerMessage, Field(discriminator="kind")])
