"""What a local run tells those who watch it."""

from dataclasses import dataclass
from typing import Literal

from ..messages import CheckpointSaved, Completed, Progress, Ready
from .history import HistoryItem


@dataclass(frozen=True)
class Opened:
    """The run has a name and a folder; its workers are being started."""

    job: str
    folder: str
    resumed: bool


@dataclass(frozen=True)
class Known:
    """The script has reached its training call: how much there is to do is known."""

    ready: Ready


@dataclass(frozen=True)
class Rescaled:
    """A generation took effect; the first one has nothing before it."""

    generation: int
    before: int
    after: int
    iteration: int
    pause_seconds: float


@dataclass(frozen=True)
class Progressed:
    """Iterations were committed."""

    progress: Progress
    workers: int


@dataclass(frozen=True)
class Saved:
    """A checkpoint is complete."""

    checkpoint: CheckpointSaved


@dataclass(frozen=True)
class Trained:
    """Training is complete; the scripts may still go on."""

    completed: Completed


@dataclass(frozen=True)
class Noted:
    """Something the user should know that stops nothing."""

    text: str


@dataclass(frozen=True)
class Recorded:
    """The history has grown."""

    item: HistoryItem


@dataclass(frozen=True)
class Printed:
    """A worker printed a line. ``leads``: it is the lowest rank, the one whose output stands for all."""

    worker: int
    stream: Literal["stdout", "stderr"]
    line: str
    leads: bool


RunEvent = Opened | Known | Rescaled | Progressed | Saved | Trained | Noted | Recorded | Printed
