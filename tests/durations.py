"""How long each test took, and how much processor time it and the processes it started consumed.

`make durations` runs the tests with this pytest plugin, and writes the table tests/durations.md. On a machine that
others share, processor time says more than time on the clock. Processes that a later test ends, such as a pool of a
whole module, count there; those that nobody waited for do not count.
"""

import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest

VARIABLE = "RESILE_TEST_DURATIONS"
"""Names the file to append to."""
SECONDS_OF_SMALL_FILES = 10.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    started, consumed_before = time.monotonic(), consumed()
    result = yield
    line = f"{time.monotonic() - started:.3f}\t{consumed() - consumed_before:.3f}\t{item.nodeid}\n"
    with Path(os.environ[VARIABLE]).open("a") as durations:
        durations.write(line)
    return result


def consumed() -> float:
    """Return the processor seconds of this process, and of all children that it has waited for."""
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@dataclass(frozen=True)
class Group:
    name: str
    num_tests: int
    seconds: float
    processor_seconds: float

    def __str__(self) -> str:
        return f"| {self.name} | {self.num_tests} | {self.seconds:.0f} | {self.processor_seconds:.0f} |"


def table(lines: list[str]) -> str:
    """Return the table of files, those that took longest first."""
    tests = sorted((line.rstrip("\n").split("\t") for line in lines), key=lambda test: file_of(test[2]))
    groups = [
        Group(file, len(those := list(found)), sum(float(t[0]) for t in those), sum(float(t[1]) for t in those))
        for file, found in groupby(tests, key=lambda test: file_of(test[2]))
    ]
    large = [group for group in groups if group.processor_seconds >= SECONDS_OF_SMALL_FILES]
    small = [group for group in groups if group not in large]
    large.sort(key=lambda group: -group.processor_seconds)
    rows = [total(f"{len(groups)} files", groups), *large, total(f"{len(small)} other files", small)]
    return "\n".join(("| file | tests | seconds | processor seconds |", "|---|---|---|---|", *map(str, rows)))


def file_of(test: str) -> str:
    return test.partition("::")[0]


def total(name: str, groups: list[Group]) -> Group:
    return Group(
        name,
        sum(group.num_tests for group in groups),
        sum(group.seconds for group in groups),
        sum(group.processor_seconds for group in groups),
    )


if __name__ == "__main__":
    print("# How long tests take\n\nWritten by `make durations` (tests/durations.py).\n")
    print(table(Path(sys.argv[1]).read_text().splitlines()))
