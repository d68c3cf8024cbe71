"""The protocol between a fork server and its client: one JSON object per packet, over a SOCK_SEQPACKET pair.

Workers of several jobs may have the same id, so the client numbers the processes that it requests.
A fork request carries four file descriptors, in the order of `FORK_DESCRIPTORS`. The configuration travels as a memory
file because a packet is bounded and a script's arguments are not. The worker keeps the file open: its name in
/proc/PID/fd identifies the job and the worker that a process belongs to. The request for a template carries one, a
memory file with a `TemplateContent`. The client numbers templates too. The request for a description of the devices
carries one, a socket.
"""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from ..messages import MAX_IMPORTED, CodeCopy, Message, ModuleName

FORK_DESCRIPTORS = ("config", "agent", "stdout", "stderr")
MAX_PACKET_BYTES = 64 * 1024

PROCESS_NAME_PREFIX = "resile-worker:"


def process_name(job: str, worker: int) -> str:
    """Return the name of a worker's memory file."""
    return f"{PROCESS_NAME_PREFIX}{job}/{worker}"


class ForkRequest(Message):
    """Fork a worker, from a template if one is named and it can; else from the fork server."""

    kind: Literal["fork"] = "fork"
    process: int
    template: int | None = None


class KillRequest(Message):
    """Kill the worker and what it started. No effect on a worker that has ended."""

    kind: Literal["kill"] = "kill"
    process: int


class TemplateContent(Message):
    """What a template imports, and where."""

    modules: tuple[ModuleName, ...] = Field(
        default=(), max_length=MAX_IMPORTED, description="in this order, after what the head of the script imports"
    )
    script: str
    code: CodeCopy | None = None
    directory: str
    env: dict[str, str] = Field(default_factory=dict)
    is_urgent: bool = Field(default=True, description="workers wait for it: it is not held back in favour of training")


class TemplateRequest(Message):
    """Start a template."""

    kind: Literal["template"] = "template"
    template: int


class TemplateKillRequest(Message):
    """Kill a template. Workers that were forked from it live on. No effect on one that has ended."""

    kind: Literal["kill template"] = "kill template"
    template: int


class TemplateLoaded(Message):
    """Workers can be forked from the template."""

    kind: Literal["template loaded"] = "template loaded"
    template: int
    num_modules: int = Field(description="of those that the fork server has not imported")
    num_bytes: int = Field(description="memory that it shares with nobody")


class TemplateExited(Message):
    """No worker is forked from the template any more."""

    kind: Literal["template exited"] = "template exited"
    template: int
    reason: str
    is_refused: bool = Field(default=False, description="because of what it imported: another one would end alike")


class DevicesRequest(Message):
    """Describe the accelerators of this machine, in a child with ``env``, to the descriptor that comes with this."""

    kind: Literal["devices"] = "devices"
    env: dict[str, str] = Field(default_factory=dict)


class Preloaded(Message):
    """Everything is imported: from now on a fork takes milliseconds."""

    kind: Literal["preloaded"] = "preloaded"


class PreloadFailed(Message):
    """An import failed; the fork server exits."""

    kind: Literal["preload failed"] = "preload failed"
    error: str
    details: str


class ProcessForked(Message):
    """The worker's process runs."""

    kind: Literal["forked"] = "forked"
    process: int
    pid: int


class ForkRefused(Message):
    """The system did not allow the fork."""

    kind: Literal["refused"] = "refused"
    process: int
    reason: str


class ProcessExited(Message):
    """The worker's process has ended, and its session with it. ``status`` is its exit status, or minus the signal."""

    kind: Literal["exited"] = "exited"
    process: int
    status: int


Request = ForkRequest | KillRequest | TemplateRequest | TemplateKillRequest | DevicesRequest
Response = Preloaded | PreloadFailed | ProcessForked | ForkRefused | ProcessExited | TemplateLoaded | TemplateExited
request: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="kind")])
response: TypeAdapter[Response] = TypeAdapter(Annotated[Response, Field(discriminator="kind")])
