"""How often a checkpoint is due."""

import re
import time
from collections.abc import Callable

from resile_shared.errors import UsageError

_UNITS = {"s": 1, "sec": 1, "second": 1, "m": 60, "min": 60, "minute": 60, "h": 3600, "hour": 3600}


class CheckpointInterval:
    """A number of iterations, or of seconds on the ``clock`` of the lowest rank; None: a checkpoint is never due.

    Raises UsageError for anything else.
    """

    def __init__(self, every: int | str | None, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.monotonic
        self._iterations: int | None = None
        self._seconds: float | None = None
        if isinstance(every, str):
            self._seconds = _seconds(every)
        elif every is not None:
            if every < 1:
                raise UsageError(
                    f'checkpoint_every is {every}: use a number of iterations from 1 up, or a time such as "5 min"'
                )
            self._iterations = every
        self._started = self._clock()

    def is_due(self, iteration: int) -> bool:
        """Whether a checkpoint is due once ``iteration`` iterations are committed."""
        if self._iterations is not None:
            return iteration % self._iterations == 0
        return self._seconds is not None and self._clock() - self._started >= self._seconds

    def restart(self) -> None:
        """Measure the time from now: a checkpoint is being taken."""
        self._started = self._clock()


def _seconds(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text.lower())
    unit = _UNITS.get(match.group(2)) or _UNITS.get(match.group(2).removesuffix("s")) if match else None
    if match is None or unit is None or float(match.group(1)) == 0:
        raise UsageError(
            f'checkpoint_every is {text!r}: use a number of iterations, or a time such as "30 s", "5 min" or "1 h"'
        )
    return float(match.group(1)) * unit
