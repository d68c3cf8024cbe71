"""How fuzzers run: the same few examples in every test run, or new ones for `FUZZ_SECONDS` each (`make fuzz`)."""

import functools
import os
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings

SECONDS = float(os.environ.get("FUZZ_SECONDS") or 0)
_BATCH = 50


def fuzzed(*, examples: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a test that has `given`: ``examples`` is how many every test run tries."""

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        common: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
        if not SECONDS:
            return settings(max_examples=examples, derandomize=True, **common)(test)
        batch = settings(max_examples=_BATCH, print_blob=True, **common)(test)

        @functools.wraps(test)
        def repeated(*args: Any, **kwargs: Any) -> None:
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                batch(*args, **kwargs)

        return repeated

    return decorate
