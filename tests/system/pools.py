"""A real `resile up`, and the real command that talks to it."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from resile_shared.messages.jobs import JobState
from resile_testing.waiting import PATIENCE_SECONDS

from .conftest import Ended
from .test_leftovers import marked


class UpPool:
    """A pool that is up in ``home``."""

    def __init__(self, home: Path, process: "subprocess.Popen[str]", mark: str) -> None:
        self.home = home
        self.process = process
        self._mark = mark
        ready = process.stdout.readline() if process.stdout else ""
        assert ready, f"it ended with {process.wait()}: {process.stderr.read() if process.stderr else ''}"
        self.ready: dict[str, Any] = json.loads(ready)

    def run(self, *arguments: object) -> Ended:
        """Run a command to its end."""
        done = subprocess.run(
            [sys.executable, "-m", "resile", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env={**os.environ, "RESILE_HOME": str(self.home)},
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    def ask(self, *arguments: object) -> Any:
        """Run a command that succeeds; return its JSON."""
        ended = self.run(*arguments, "--json")
        assert ended.status == 0, ended.err
        return ended.json

    def submit(self, *arguments: object) -> str:
        """Submit a job; return its id."""
        ended = self.run("submit", *arguments)
        assert ended.status == 0, ended.err
        return ended.out.strip()

    def view(self, job: str) -> dict[str, Any]:
        """A job as the API shows it: many looks, without a process for each."""
        pool = json.loads((self.home / "pool.json").read_bytes())
        request = urllib.request.Request(
            f"{pool['url']}/v1/jobs/{job}", headers={"Authorization": f"Bearer {pool['token']}"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            view: dict[str, Any] = json.load(answer)
        return view

    def becomes(
        self, job: str, fits: Callable[[dict[str, Any]], object], *, seconds: float = PATIENCE_SECONDS
    ) -> dict[str, Any]:
        """Wait until the job is as ``fits`` wants it."""
        deadline = time.monotonic() + seconds
        while not fits(view := self.view(job)):
            assert not JobState(view["state"]).is_final, view
            assert time.monotonic() < deadline, view
            time.sleep(0.1)
        return view

    def completed(self, job: str) -> dict[str, Any]:
        """Wait until the job has completed."""
        ended = self.run("wait", job)
        assert ended.status == 0, ended.err + self.run("logs", job).out
        return self.view(job)

    def service(self, module: str) -> psutil.Process:
        """The process of one service."""
        (found,) = (child for child in self.children() if any(module in word for word in child.cmdline()))
        return found

    def children(self) -> list[psutil.Process]:
        """The processes that it started or adopted, but for those that have ended."""
        return [child for child in self._all_children() if _status(child) not in (None, psutil.STATUS_ZOMBIE)]

    def zombies(self) -> list[psutil.Process]:
        """Processes that have ended, and that nobody has asked how."""
        return [child for child in self._all_children() if _status(child) == psutil.STATUS_ZOMBIE]

    def _all_children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def left(self) -> dict[int, str]:
        """All processes of the pool that are there."""
        return marked(self._mark)

    def end(self, number: signal.Signals, *, to_all: bool = False) -> Ended:
        """Send a signal, with ``to_all`` to every process as systemd does; return how it ended."""
        for pid in self.left() if to_all else [self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        out, err = self.process.communicate(timeout=240)
        return Ended(self.process.returncode, out, err)


def _status(process: psutil.Process) -> str | None:
    """None once it is gone."""
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return None


@contextmanager
def pool_up(home: Path, *options: object, prefix: Sequence[str] = ()) -> Iterator[UpPool]:
    """Run a pool while the block runs; it is given its Ctrl-C at the end. ``prefix`` goes before the command."""
    mark = f"POOL_MARK={uuid.uuid4().hex}"
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", "resile", "up", "--home", str(home), "--json", *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "POOL_MARK": mark.partition("=")[2]},
    )
    try:
        pool = UpPool(home, process, mark)
        yield pool
        if process.poll() is None:
            assert pool.end(signal.SIGINT).status == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
