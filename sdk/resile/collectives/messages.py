"""What a member and the rendezvous send each other before the member is a worker: one JSON object per line.

Once it is one, the same connection carries the messages of workers and their agents (`resile_learner.messages`), and
`LeaveRequested` and `GroupEnded`.
"""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from resile_learner.messages import SentByWorker, WorkerId
from resile_shared.messages.jobs import MAX_WORKERS
from resile_shared.messages.message import Id, Message, Positive, Text

MAX_MEMBERS = MAX_WORKERS - 1
"""The maximum number of members of a group. `MAX_WORKERS` as the maximum of a job means that none was given."""
MembersCount = Annotated[int, Field(ge=1, le=MAX_MEMBERS)]


class Hello(Message):
    """A process asks to become a member."""

    kind: Literal["hello"] = "hello"
    size: MembersCount = Field(description="the members with which the group starts, at least")
    num_shards: MembersCount | None = Field(description="null: one for each member")
    token: str = Field(default="", max_length=256, repr=False)
    is_member: bool = Field(default=False, description="of a group whose rendezvous was lost: it continues that group")


class Waiting(Message):
    """The group has not started: ``present`` of ``size`` members are here."""

    kind: Literal["waiting"] = "waiting"
    present: Positive
    size: Positive


class Welcome(Message):
    """The process is a worker from now on."""

    kind: Literal["welcome"] = "welcome"
    group: Id
    worker: WorkerId
    detection_seconds: float = Field(gt=0)


class Rejected(Message):
    """The process cannot become a member; the connection ends."""

    kind: Literal["rejected"] = "rejected"
    reason: Text


class LeaveRequested(Message):
    """A member asks for a generation without itself."""

    kind: Literal["leave"] = "leave"


class GroupEnded(Message):
    """From each of ``members``: all of them leave after the same iteration."""

    kind: Literal["ended"] = "ended"
    members: tuple[WorkerId, ...] = Field(max_length=MAX_MEMBERS)


to_process: TypeAdapter[Waiting | Welcome | Rejected] = TypeAdapter(
    Annotated[Waiting | Welcome | Rejected, Field(discriminator="kind")]
)
from_member: TypeAdapter[SentByWorker | LeaveRequested | GroupEnded] = TypeAdapter(
    Annotated[SentByWorker | LeaveRequested | GroupEnded, Field(discriminator="kind")]
)
