"""A pytest plugin: how long each test took, and how much processor time it and the processes it started consumed.

`make durations` writes tests/durations.md with it. On a machine that others share, processor time says more than the
time on the clock; processes that outlive their test, or that nobody waited for, are missing from it.
"""

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def consumed() -> float:
    """Processor seconds of this process, and of all children that it has waited for."""
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    started, consumed_before = time.monotonic(), consumed()
    result = yield
    line = f"{time.monotonic() - started:.3f}\t{consumed() - consumed_before:.3f}\t{item.nodeid}\n"
    with Path(os.environ["DURATIONS"]).open("a") as durations:
        durations.write(line)
    return result
