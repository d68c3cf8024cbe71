"""The same two trainings, each alone on one worker: what their parameters have to be compared with."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from ..local.result import Result
from ..undisturbed import train_alone
from .story import SCRIPT, Part


async def train(parts: Sequence[Part], *, home: Path) -> list[Result]:
    """Train all of them side by side, one worker each. Raises ResileError when one does not complete."""
    return list(await asyncio.gather(*(train_alone(SCRIPT, part.args, home=home, name=part.name) for part in parts)))
