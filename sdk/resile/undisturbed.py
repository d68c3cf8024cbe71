"""A training alone on one worker: what the parameters of one that was disturbed have to be compared with."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from resile_shared.errors import ResileError

from .local.plan import parse_plan
from .local.result import Result
from .local.run import LocalRun
from .local.settings import RunSettings


async def train_alone(
    script: Path, args: Sequence[str], *, home: Path, name: str, env: Mapping[str, str] | None = None
) -> Result:
    """Train on one worker, to the end. Raises ResileError if it does not complete."""
    settings = RunSettings(
        script=script, args=tuple(args), env=env or {}, plan=parse_plan("0:1"), home=home, name=name.replace(" ", "-")
    )
    result = await LocalRun(settings).run()
    if result.completed is None:
        raise ResileError(f"{name} alone {result.outcome.state}: {result.outcome.error}; logs: {result.logs}")
    return result
