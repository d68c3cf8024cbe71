"""What a local run is asked to do, checked when it is made."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from resile_scheduler.policies.plan import PlanPolicy, PlanStep
from resile_shared.control_groups import num_processors
from resile_shared.errors import UsageError
from resile_shared.messages.datasets import Dataset
from resile_shared.messages.reports import BatchStep

from .plan import MAX_LOCAL_WORKERS

MAX_DEFAULT_WORKERS = 4


@dataclass(frozen=True)
class Resume:
    """Resume an earlier run: the newest one of the script, unless ``run`` names one."""

    run: str | None = None
    code: Literal["old", "new"] | None = None
    """The code and arguments to go on with if they have changed: as the run began with them, or as they are now.

    None: it is an error if they have changed.
    """

    @classmethod
    def of(cls, run: str | None, code: str | None) -> "Resume | None":
        """Return what is asked for by the flags `--resume` and `--code`. Raises UsageError."""
        if code not in (None, "old", "new"):
            raise UsageError(f"--code {code}: the code to resume with is old or new")
        if run is None and code is not None:
            raise UsageError(f"--code {code} says with which code a run is resumed: add --resume")
        return None if run is None else cls(run or None, code)  # type: ignore[arg-type]


@dataclass(frozen=True)
class RunSettings:
    """One `resile run`. Checked when it is made: raises UsageError."""

    script: Path
    args: tuple[str, ...] = ()
    workers: int | None = None
    """The number of workers, at most one for each shard. None: one for each core, at most `MAX_DEFAULT_WORKERS`."""
    plan: tuple[PlanStep, ...] | None = None
    """The numbers of workers from iteration to iteration."""
    batches: tuple[BatchStep, ...] = ()
    """The batches of another run, which this one replays; empty: none."""
    requirements: tuple[str, ...] = ()
    """What the script needs besides the packages of this environment; empty: those of the run that is resumed."""
    data: tuple[Dataset, ...] = ()
    """Data that is fetched before workers start; empty: that of the run that is resumed."""
    mounts: tuple[str, ...] = ()
    """Paths that must exist."""
    env: Mapping[str, str] = field(default_factory=dict)
    home: Path = Path("~/.resile")
    storage: str | None = None
    """URL of the object storage for checkpoints and the model; None: the run's folder in the home."""
    resume: Resume | None = None
    name: str | None = None
    output: Path | None = None
    """Where to copy the trained model."""
    detection_seconds: float = 3.0
    """A worker that is silent for this many seconds is lost."""

    def __post_init__(self) -> None:
        if sys.platform != "linux":
            raise UsageError(
                f"`resile run` needs Linux, and this is {sys.platform}: `python {self.script}` trains in one process"
            )
        _check_script(self.script)
        for mount in self.mounts:
            _check_mount(mount)
        if self.output is not None:
            _check_output(self.output)
        if self.workers is not None and not 1 <= self.workers <= MAX_LOCAL_WORKERS:
            raise UsageError(f"--workers {self.workers}: a run on this machine has 1 to {MAX_LOCAL_WORKERS} workers")
        if self.plan is not None and self.workers is not None and self.plan[0].workers != self.workers:
            raise UsageError(
                f"--workers {self.workers} and a plan that starts with {self.plan[0].workers} workers contradict each "
                "other: leave out --workers"
            )

    @property
    def policy(self) -> PlanPolicy:
        """How many workers the run has at which iteration."""
        steps = self.plan or (PlanStep(0, self.workers or min(num_processors(), MAX_DEFAULT_WORKERS)),)
        return PlanPolicy(steps, fits_shards=True)


def _check_script(script: Path) -> None:
    if script.is_dir():
        raise UsageError(f"{script} is a folder: name the script file in it")
    if not script.exists():
        raise UsageError(f"there is no script {script} (looked in {Path.cwd()})")
    if not os.access(script, os.R_OK):
        raise UsageError(f"the script {script} is not readable: check its permissions")


def _check_mount(mount: str) -> None:
    try:
        os.stat(mount)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(f"--mount {mount}: there is no such file or folder: mount it, or correct the path") from error
    except OSError as error:
        raise UsageError(f"--mount {mount}: {error.strerror}: correct the path, or its permissions") from error


def _check_output(output: Path) -> None:
    if output.is_dir():
        raise UsageError(f"-o {output} is a folder: name a file in it, such as {output / 'model.safetensors'}")
    if not output.parent.is_dir():
        raise UsageError(f"-o {output}: there is no folder {output.parent}")
    if not os.access(output.parent, os.W_OK):
        raise UsageError(f"-o {output}: the folder {output.parent} is not writable")
