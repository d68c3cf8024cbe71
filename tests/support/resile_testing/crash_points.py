"""Crashes a service at every point of its work: before and after each write and each message.

Every process records the points that it passes, so one undisturbed run lists them all. A service that has crashed is
restarted at once, and does not crash again.
"""

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from resile_shared.processes import dying_with_parent

from . import crashable
from .crashable import Point
from .waiting import until

MAX_CONCURRENT = 6
SEED = 1


class CrashableProcess:
    """One process of a service."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The exit status of the process, or minus the signal that ended it."""

    def kill(self) -> None:
        """``kill -9`` it."""
        if not self.ended.done():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Forker:
    """Starts processes of the service ``name``, forked from one that has imported it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._num_requests = 0
        self._requested: dict[int, asyncio.Future[CrashableProcess]] = {}
        self._running: dict[int, CrashableProcess] = {}

    @classmethod
    @asynccontextmanager
    async def of(cls, name: str) -> "AsyncIterator[Forker]":
        """Prepare to start ``python -m resile_<name>``; on exit all its processes are killed."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", crashable.__name__, name),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            preexec_fn=dying_with_parent(),
        )
        forker = cls(process)
        reading = asyncio.create_task(forker._read())
        try:
            yield forker
        finally:
            for running in forker._running.values():
                running.kill()
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            await reading

    async def fork(self, *flags: str, fatal: Point | None, log: Path) -> CrashableProcess:
        """Start a process that crashes at ``fatal``, if there is one, and records the points it passes in ``log``."""
        self._num_requests += 1
        requested = self._requested[self._num_requests] = asyncio.get_running_loop().create_future()
        request = {"number": self._num_requests, "flags": flags, "fatal": fatal, "log": str(log)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        process: CrashableProcess = await requested
        return process

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            message = json.loads(line)
            if "number" in message:
                process = self._running[message["pid"]] = CrashableProcess(message["pid"])
                requested = self._requested.pop(message["number"])
                if requested.cancelled():
                    process.kill()
                else:
                    requested.set_result(process)
            else:
                self._running.pop(message["pid"]).ended.set_result(message["status"])


class CrashableService:
    """A service that runs inside `running`, and crashes once, at ``fatal``."""

    def __init__(self, forker: Forker, *flags: str, fatal: Point | None, log: Path) -> None:
        self._forker = forker
        self._flags = flags
        self._fatal = fatal
        self._log = log
        log.touch()
        self._process: CrashableProcess | None = None
        self.ends: list[int] = []
        """Exit statuses of the service's processes so far."""

    @property
    def points(self) -> list[Point]:
        """The points that were passed, without those that depend on time alone: renewals of a lease, and traces."""
        passed = [Point(*json.loads(line)) for line in self._log.read_text().splitlines()]
        return [point for point in passed if not _is_timed(point)]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the service inside the block; restart it when it exits."""
        supervising = asyncio.create_task(self._supervise())
        try:
            yield
        finally:
            supervising.cancel()
            await asyncio.wait({supervising})

    async def crash(self) -> None:
        """``kill -9`` it now; return when it has been restarted."""
        assert self._process is not None
        killed = self._process
        killed.kill()
        await until(lambda: self._process is not killed)

    async def _supervise(self) -> None:
        fatal = self._fatal
        try:
            while True:
                self._process = await self._forker.fork(*self._flags, fatal=fatal, log=self._log)
                self.ends.append(await asyncio.shield(self._process.ended))
                fatal = None
        finally:
            if self._process is not None:
                self._process.kill()
                await asyncio.shield(self._process.ended)


def _is_timed(point: Point) -> bool:
    return point.action.startswith("resile.trace.") or (point.action.startswith("$KV.lease.") and point.number > 1)


@dataclass(frozen=True)
class Outcome:
    """The result of a scenario (the same each time), the points passed, and how often the service crashed."""

    result: object
    points: list[Point]
    num_crashes: int


Play = Callable[[Forker, Path, Point | None], Awaitable[Outcome]]
"""A function that plays a scenario in a folder of its own; the service crashes at the point, if there is one."""


async def crash_at(name: str, play: Play, folder: Path, *, sample: int | None = None) -> None:
    """Play a scenario undisturbed, then with a crash at each point, or at a sample of them; the results must be equal.

    The points vary slightly from run to run, so a few may not be reached.
    """
    slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def with_crash(number: int, point: Point, wanted: object) -> int:
        async with slots:
            (folder / str(number)).mkdir()
            try:
                outcome = await play(forker, folder / str(number), point)
            except Exception as error:
                error.add_note(f"the {name} crashed {point.when} {point.action}, number {point.number}")
                raise
            assert outcome.result == wanted, f"{point}: {outcome.result}"
            return outcome.num_crashes

    async with Forker.of(name) as forker:
        (folder / "undisturbed").mkdir()
        undisturbed = await play(forker, folder / "undisturbed", None)
        assert undisturbed.num_crashes == 0, "it exited by itself"
        points = sorted(set(undisturbed.points))
        chosen = points if sample is None else random.Random(SEED).sample(points, sample)
        plays = (with_crash(number, point, undisturbed.result) for number, point in enumerate(chosen))
        ended = await asyncio.gather(*plays, return_exceptions=True)
        if faults := [error for error in ended if isinstance(error, BaseException)]:
            raise BaseExceptionGroup(f"{len(faults)} of {len(ended)} crashes changed the result", faults)
        crashes = [num for num in ended if isinstance(num, int)]
        assert crashes.count(0) <= len(crashes) // 4, f"{crashes.count(0)} of {len(crashes)} points were not reached"
