"""What the demo trains, in which two ways."""

import asyncio
import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from resile_learner.local.events import RunEvent
from resile_learner.local.plan import Step, parse_plan
from resile_learner.local.result import Result
from resile_learner.local.settings import RunSettings
from resile_learner.messages import Completed
from resile_shared.errors import ResileError, UsageError

from .recording import Recording

SCRIPT = Path(__file__).with_name("digits.py")
ARGUMENTS = ("--epochs", "20")
ELASTIC = parse_plan("0:1,25:4,60:2,90:8,130:3")
UNDISTURBED = parse_plan("0:1")
NEEDS = {"matplotlib": "matplotlib", "sklearn": "scikit-learn"}


class Incomplete(ResileError):
    """A run of the demo did not come to its end."""

    def __init__(self, name: str, result: Result) -> None:
        self.result = result
        super().__init__(f"the {name} run {result.outcome.state}: {result.outcome.error}; logs are in {result.logs}")


@dataclass(frozen=True)
class Run:
    """One of the two trainings, completed."""

    name: str
    plan: tuple[Step, ...]
    result: Result
    recording: Recording

    @property
    def completed(self) -> Completed:
        """What the run said at its end."""
        assert self.result.completed is not None
        return self.result.completed

    @property
    def visited(self) -> tuple[Step, ...]:
        """The plan that the run's history amounts to."""
        return tuple(Step(item.iteration, item.workers) for item in self.result.history if item.kind == "allocation")


def check_needs() -> None:
    """Raise UsageError if this is not Linux, or if a package is missing that only the demo needs."""
    if sys.platform != "linux":
        raise UsageError(f"the demo needs Linux, and this is {sys.platform}: `python {SCRIPT}` trains in one process")
    missing = [package for module, package in NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        packages = " ".join(missing)
        raise UsageError(f"the demo needs {packages}: install with `{sys.executable} -m pip install {packages}`")


def train(name: str, plan: tuple[Step, ...], *, home: Path, on_event: Callable[[RunEvent], None]) -> Run:
    """Train the example as ``plan`` says, telling ``on_event`` all that happens. Raises Incomplete."""
    from resile_learner.local.launcher import LocalRun  # only now: it can be loaded on Linux alone

    recording = Recording()

    def note(event: RunEvent) -> None:
        recording.add(event, seconds=time.monotonic())
        on_event(event)

    settings = RunSettings(script=SCRIPT, args=ARGUMENTS, plan=plan, home=home, name=f"demo-{name}")
    result = asyncio.run(LocalRun(settings).run(note))
    if result.outcome.state != "completed":
        raise Incomplete(name, result)
    return Run(name, plan, result, recording)
