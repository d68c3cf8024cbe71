"""What ``GET /v1/slots`` answers; the other models of the HTTP API are in `resile_shared.http.api`."""

from pydantic import Field

from ..messages.slot_history import MarkKind
from .api import View


class StepsView(View):
    """A number over time: each value holds from its time to the next."""

    times: tuple[int, ...] = Field(description="milliseconds since the epoch")
    values: tuple[int, ...]


class JobStepsView(View):
    """How many slots one job held over time."""

    id: str
    name: str
    held: StepsView


class MarkView(View):
    """A moment that explains what follows."""

    time: int = Field(description="milliseconds since the epoch")
    kind: MarkKind
    about: str = Field(description="the job, the host, or 'pool'")
    text: str = Field(description="the new priority or policy")


class SlotsView(View):
    """Who held how many slots over time, thinned: the newer, the finer."""

    sequence: int = Field(description="of the newest event that is included")
    begin: int = Field(description="milliseconds since the epoch")
    end: int = Field(description="when the newest event was; what held then holds until now")
    hosts: StepsView = Field(description="hosts that were up or draining")
    slots: StepsView = Field(description="slots of these hosts")
    held: StepsView = Field(description="slots that jobs held, including removed jobs")
    jobs: tuple[JobStepsView, ...] = Field(description="those that held slots, in the order of submission")
    marks: tuple[MarkView, ...] = Field(description="the newest 2,000, in order")
