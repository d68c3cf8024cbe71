"""What an agent and its zygote say to each other: one JSON object a packet, over a SOCK_SEQPACKET pair.

Workers of several jobs may have the same id, so the agent numbers the processes that it asks for.
A fork request carries four file descriptors, in the order of `FORK_DESCRIPTORS`. The configuration travels as a memory
file because a packet is bounded and a script's arguments are not. The worker keeps it open: its name, in /proc/PID/fd,
tells of every process whose worker it is.
"""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from ..messages import Message

FORK_DESCRIPTORS = ("config", "agent", "stdout", "stderr")
MAX_PACKET_BYTES = 64 * 1024


PROCESS_NAME_PREFIX = "resile-worker:"


def process_name(job: str, worker: int) -> str:
    """Return the name of a worker's memory file."""
    return f"{PROCESS_NAME_PREFIX}{job}/{worker}"


class Fork(Message):
    """Fork a worker from the warm process."""

    kind: Literal["fork"] = "fork"
    process: int


class Kill(Message):
    """Kill the worker and what it started. A worker that is gone already stays gone."""

    kind: Literal["kill"] = "kill"
    process: int


class Loaded(Message):
    """Everything is imported: from now on a fork takes milliseconds."""

    kind: Literal["loaded"] = "loaded"


class Unloadable(Message):
    """An import failed; the zygote ends."""

    kind: Literal["unloadable"] = "unloadable"
    error: str
    details: str


class Forked(Message):
    """The worker runs."""

    kind: Literal["forked"] = "forked"
    process: int
    pid: int


class Refused(Message):
    """The system did not allow the fork."""

    kind: Literal["refused"] = "refused"
    process: int
    reason: str


class Exited(Message):
    """The worker is gone, and its session with it. ``status`` is its exit status, or minus the signal."""

    kind: Literal["exited"] = "exited"
    process: int
    status: int


to_zygote: TypeAdapter[Fork | Kill] = TypeAdapter(Annotated[Fork | Kill, Field(discriminator="kind")])
from_zygote: TypeAdapter[Loaded | Unloadable | Forked | Refused | Exited] = TypeAdapter(
    Annotated[Loaded | Unloadable | Forked | Refused | Exited, Field(discriminator="kind")]
)
