"""Members of a group: threads of a test, or processes that run a script."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from resile.collectives import Group, join

T = TypeVar("T")
PATIENCE_SECONDS = 120  # how long a member may hang before a test gives up; no test waits for it to pass
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(call: Callable[[], T]) -> "Future[T]":
    """Run ``call`` in a thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def member(
    address: str, work: Callable[[Group], T], state: dict[str, Any] | None = None, **options: Any
) -> "Future[T]":
    """A member that joins, does its ``work`` and leaves, in a thread."""

    def call() -> T:
        with join(address, state, timeout=PATIENCE_SECONDS, **options) as group:
            return work(group)

    return start(call)


def results(futures: "list[Future[T]]") -> list[T]:
    return [future.result(PATIENCE_SECONDS) for future in futures]


def errors(futures: "list[Future[Any]]") -> list[BaseException | None]:
    return [future.exception(PATIENCE_SECONDS) for future in futures]


PACED = """
import runpy, sys, time
from resile.collectives import join
sleep = time.sleep
time.sleep = lambda seconds: sys.stdin.readline() if seconds == 42 else sleep(seconds)
print("imported", flush=True)
sys.argv = sys.argv[1:]
sys.stdin.readline()
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script once a line comes. With ``--seconds=42`` it goes on at each further line, or at the end of stdin."""


class Process:
    """A process that runs ``words`` by this Python; its lines are read as they come."""

    def __init__(self, *words: str | Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        self.lines: list[str] = []

    def wait_for(self, text: str) -> str:
        """Read up to the first line with ``text``."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))
            if text in line:
                return self.lines[-1]
        raise AssertionError(f"{text!r} never came: {self.lines[-5:]}, {self.end()}")

    def go(self, num_lines: int = 1) -> None:
        """Let a paced process go on."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n" * num_lines)
        self._process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Wait until the process has ended; return its status and what it wrote to stderr."""
        out, err = self._process.communicate(timeout=PATIENCE_SECONDS)
        self.lines += out.splitlines()
        return self._process.returncode, err

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


@contextmanager
def processes() -> Iterator[Callable[..., Process]]:
    """Starts processes; kills those that are left."""
    started: list[Process] = []

    def start_process(*words: str | Path) -> Process:
        started.append(Process(*words))
        return started[-1]

    try:
        yield start_process
    finally:
        for process in started:
            process.kill()
