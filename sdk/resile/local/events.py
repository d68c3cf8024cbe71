"""What a local run shows to its user."""

from dataclasses import dataclass
from typing import Literal

from resile_shared.messages.reports import CheckpointSaved, Progress, Ready


@dataclass(frozen=True)
class RunOpened:
    """The run has a name and a folder; its workers are being started."""

    job: str
    folder: str
    is_resumed: bool


@dataclass(frozen=True)
class TrainingCalled:
    """The script has reached its training call: how much there is to do is known."""

    ready: Ready


@dataclass(frozen=True)
class Rescaled:
    """A generation became active; ``before`` is 0 when nothing trained."""

    generation: int
    before: int
    after: int
    iteration: int
    pause_seconds: float
    reason: str


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
class Noted:
    """Something the user should know that stops nothing."""

    text: str


@dataclass(frozen=True)
class Printed:
    """A worker printed a line. ``is_lowest_rank``: its output stands for all."""

    worker: int
    stream: Literal["stdout", "stderr"]
    line: str
    is_lowest_rank: bool


RunEvent = RunOpened | TrainingCalled | Rescaled | Progressed | Saved | Noted | Printed
