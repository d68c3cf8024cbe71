"""A service that is killed at every point of its work: before and after each thing that it stores or says.

Every process notes the points that it passes, so one undisturbed run tells which there are. A service that dies in a
test is started again at once, and is left alone then.
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

from ..parent_death import dying_with_parent
from . import mortal
from .mortal import Point
from .waiting import until

NUM_AT_ONCE = 6
SEED = 1


class MortalProcess:
    """One process of a service."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Its exit status, or minus the signal."""

    def kill(self) -> None:
        """``kill -9`` it."""
        if not self.ended.done():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Forker:
    """Starts processes of the service ``name``, forked from one that has imported it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._num_wishes = 0
        self._wishes: dict[int, asyncio.Future[MortalProcess]] = {}
        self._running: dict[int, MortalProcess] = {}

    @classmethod
    @asynccontextmanager
    async def of(cls, name: str) -> "AsyncIterator[Forker]":
        """Be ready to start ``python -m resile_<name>``; at the end all its processes are gone."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", mortal.__name__, name),
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

    async def fork(self, *flags: str, fatal: Point | None, log: Path) -> MortalProcess:
        """Start a process that dies at ``fatal``, if there is one, and notes in ``log`` what it passes."""
        self._num_wishes += 1
        wished = self._wishes[self._num_wishes] = asyncio.get_running_loop().create_future()
        wish = {"number": self._num_wishes, "flags": flags, "fatal": fatal, "log": str(log)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(wish).encode() + b"\n")
        process: MortalProcess = await wished
        return process

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            said = json.loads(line)
            if "number" in said:
                process = self._running[said["pid"]] = MortalProcess(said["pid"])
                wished = self._wishes.pop(said["number"])
                if wished.cancelled():
                    process.kill()
                else:
                    wished.set_result(process)
            else:
                self._running.pop(said["pid"]).ended.set_result(said["status"])


class MortalService:
    """A service that is there for as long as `kept` runs, and dies once, at ``fatal``."""

    def __init__(self, forker: Forker, *flags: str, fatal: Point | None, log: Path) -> None:
        self._forker = forker
        self._flags = flags
        self._fatal = fatal
        self._log = log
        log.touch()
        self._process: MortalProcess | None = None
        self.ends: list[int] = []
        """How its processes have ended so far."""

    @property
    def points(self) -> list[Point]:
        """The points that were passed, but for the renewals of a lease: nothing but time leads to those."""
        passed = [Point(*json.loads(line)) for line in self._log.read_text().splitlines()]
        return [point for point in passed if not (point.deed.startswith("$KV.lease.") and point.number > 1)]

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Have it run, and start it again when it has died."""
        keeping = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.wait({keeping})

    async def strike(self) -> None:
        """``kill -9`` it now; return when it has been started again."""
        assert self._process is not None
        struck = self._process
        struck.kill()
        await until(lambda: self._process is not struck)

    async def _keep(self) -> None:
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


@dataclass(frozen=True)
class Outcome:
    """What a scenario came to: what must be the same each time, the points passed, and how often the service died."""

    result: object
    points: list[Point]
    num_deaths: int


Play = Callable[[Forker, Path, Point | None], Awaitable[Outcome]]
"""Plays a scenario in a folder of its own, in which the service dies at the point, if there is one."""


async def die_at(name: str, play: Play, folder: Path, *, sample: int | None = None) -> None:
    """Play a scenario undisturbed, and then for each point, or for a sample of them; the results must be equal.

    Which deeds there are can vary a little from one time to the next, so a few points may not be reached.
    """
    room = asyncio.Semaphore(NUM_AT_ONCE)

    async def dying(number: int, point: Point, wanted: object) -> int:
        async with room:
            (folder / str(number)).mkdir()
            try:
                outcome = await play(forker, folder / str(number), point)
            except Exception as error:
                error.add_note(f"the {name} died {point.when} {point.deed}, number {point.number}")
                raise
            assert outcome.result == wanted, f"{point}: {outcome.result}"
            return outcome.num_deaths

    async with Forker.of(name) as forker:
        (folder / "undisturbed").mkdir()
        undisturbed = await play(forker, folder / "undisturbed", None)
        assert undisturbed.num_deaths == 0, "it died by itself"
        points = sorted(set(undisturbed.points))
        chosen = points if sample is None else random.Random(SEED).sample(points, sample)
        dying_at = (dying(number, point, undisturbed.result) for number, point in enumerate(chosen))
        ended = await asyncio.gather(*dying_at, return_exceptions=True)
        if faults := [error for error in ended if isinstance(error, BaseException)]:
            raise BaseExceptionGroup(f"{len(faults)} of {len(ended)} deaths made a difference", faults)
        deaths = [num for num in ended if isinstance(num, int)]
        assert deaths.count(0) <= len(deaths) // 4, f"{deaths.count(0)} of {len(deaths)} points were not reached"
