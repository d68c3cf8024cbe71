"""The same two trainings, each alone on one worker: what their parameters have to be compared with."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from resile_learner.local.launcher import LocalRun
from resile_learner.local.plan import parse_plan
from resile_learner.local.result import Result
from resile_learner.local.settings import RunSettings
from resile_shared.errors import ResileError

from .story import SCRIPT, Part


async def train(parts: Sequence[Part], *, home: Path) -> list[Result]:
    """Train all of them side by side, one worker each. Raises ResileError when one does not complete."""
    return list(await asyncio.gather(*(_train(part, home=home) for part in parts)))


async def _train(part: Part, *, home: Path) -> Result:
    settings = RunSettings(
        script=SCRIPT, args=part.args, plan=parse_plan("0:1"), home=home, name=part.name.replace(" ", "-")
    )
    result = await LocalRun(settings).run()
    if result.completed is None:
        raise ResileError(f"{part.name} alone {result.outcome.state}: {result.outcome.error}; logs: {result.logs}")
    return result
