"""The demo: two jobs on a pool of two hosts with four slots each.

Job 1 takes all eight slots; job 2 is submitted, and each gets four; the priority of job 2 is doubled, and they get
three and five; a host is killed, and they share the other one, one and three, until it is back; job 1 completes, and
job 2 takes all eight. Each step waits until the one before has taken effect.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from resile_shared.errors import ResileError
from resile_shared.http.api import HostView, JobSummary, JobView
from resile_shared.messages.jobs import DEFAULT_PRIORITY, JobSpec, JobState

from ..client import AsyncClient
from ..local.result import Result
from ..local.run import train_alone
from ..package import pack
from .recording import Recording

SCRIPT = Path(__file__).with_name("digits.py")
NUM_HOSTS, SLOTS_PER_HOST = 2, 4
NUM_SLOTS = NUM_HOSTS * SLOTS_PER_HOST
HIGH_PRIORITY = 2 * DEFAULT_PRIORITY
STAY = 24  # iterations at each shape before the story goes on
LEAST = 12  # the same where there is less to see
LOOK_SECONDS = 0.25
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class Part:
    """One of the two trainings, and how many workers it should have one after the other."""

    name: str
    args: tuple[str, ...]
    workers: tuple[int, ...]


_SHARDS = ("--num-shards", "24")  # so that 3, 4, 5 and 8 workers differ in speed
FIRST = Part("job 1", ("--epochs", "38", *_SHARDS), (8, 4, 3, 1, 3))
SECOND = Part("job 2", ("--epochs", "54", "--seed", "1", "--lr", "0.003", *_SHARDS), (4, 5, 3, 5, 8))


class StoryFailed(ResileError):
    """The pool did not reach the next step of the demo."""


Look = Callable[[Sequence[JobSummary], Sequence[HostView]], None]


class Story:
    """Runs the demo on a pool.

    ``log`` gets a line for each step, ``on_look`` the jobs and hosts of each poll; ``kill`` kills a host by name.
    """

    def __init__(
        self, client: AsyncClient, *, log: Callable[[str], None], on_look: Look, kill: Callable[[str], None]
    ) -> None:
        self._client = client
        self._kill = kill
        self._log = log
        self._on_look = on_look
        self.recording = Recording(time.time())

    async def run(self) -> tuple[JobView, JobView]:
        """Return both jobs, completed. Raises StoryFailed."""
        self._tell(f"job 1 is submitted, with up to {NUM_SLOTS} workers")
        one = await self._submit(FIRST)
        await self._until(f"job 1 trains on {NUM_SLOTS} slots", {one: NUM_SLOTS}, stay={one: STAY})

        self._tell("job 2 is submitted: the jobs share the slots")
        two = await self._submit(SECOND)
        await self._until("both train on 4 slots", {one: 4, two: 4}, stay={one: STAY, two: STAY})

        self._tell(f"job 2's priority goes from {DEFAULT_PRIORITY} to {HIGH_PRIORITY}")
        await self._client.set_priority(two, HIGH_PRIORITY)
        await self._until("they train on 3 and 5 slots", {one: 3, two: 5}, stay={one: STAY, two: STAY})

        victim = await self._host_of(two)
        self._tell(f"{victim.id} is killed, with its agent and all its workers")
        self._kill(victim.id)
        self.recording.killed.add((victim.id, victim.incarnation))
        await self._until("they train on 1 and 3 slots", {one: 1, two: 3}, stay={one: LEAST, two: LEAST})
        self._tell(f"waiting for {victim.id} to come back")
        await self._until("they train on 3 and 5 slots again", {one: 3, two: 5}, stay={one: LEAST, two: LEAST})

        self._tell("job 1 completes, and job 2 takes its slots")
        await self._until(f"job 2 trains on {NUM_SLOTS} slots", {two: NUM_SLOTS}, over=(one,))
        await self._until("job 2 completes", {}, over=(one, two))
        return await self._client.job(one), await self._client.job(two)

    def _tell(self, text: str) -> None:
        self.recording.note(text, now=time.time())
        self._log(text)

    async def _submit(self, part: Part) -> str:
        package = await asyncio.to_thread(pack, SCRIPT)
        key = await self._client.upload(package.content)
        spec = JobSpec(name=part.name, package=key, script=package.script, args=part.args, max_workers=NUM_SLOTS)
        return await self._client.submit(spec)

    async def _host_of(self, job: str) -> HostView:
        """Return a host that runs workers of this job alone."""
        for host in await self._client.hosts():
            if all(slot.job == job for slot in host.slots):
                return host
        raise StoryFailed(f"no host runs workers of {job} alone")

    async def _until(
        self, what: str, workers: dict[str, int], *, stay: dict[str, int] | None = None, over: Sequence[str] = ()
    ) -> None:
        """Poll until jobs have these workers, have trained ``stay`` iterations with them, and others are over."""
        reached: dict[str, int] = {}
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            jobs = {job.id: job for job in await self._look()}
            for job in over:
                if jobs[job].state is JobState.COMPLETED:
                    workers = {name: number for name, number in workers.items() if name != job}
            if all(jobs[job].workers == number for job, number in workers.items()):
                for job in workers:
                    reached.setdefault(job, jobs[job].iteration)
                stayed = all(jobs[job].iteration - reached[job] >= least for job, least in (stay or {}).items())
                if stayed and all(jobs[job].state is JobState.COMPLETED for job in over):
                    return
            await asyncio.sleep(LOOK_SECONDS)
        raise StoryFailed(f"timeout after {PATIENCE_SECONDS:.0f} s: waiting until {what}")

    async def _look(self) -> Sequence[JobSummary]:
        jobs, hosts = await asyncio.gather(self._client.jobs(), self._client.hosts())
        self.recording.add(jobs, now=time.time())
        self.recording.add_hosts(hosts, now=time.time())
        self._on_look(jobs, hosts)
        for job in jobs:
            if job.state in (JobState.FAILED, JobState.STOPPED):
                raise StoryFailed(f"{job.name} {job.state.value}: {job.reason}")
        return jobs


async def train_undisturbed(parts: Sequence[Part], *, home: Path) -> list[Result]:
    """Train the same jobs, each alone on one worker, side by side: their parameters are what the story has to give.

    Raises ResileError when one does not complete.
    """
    return list(await asyncio.gather(*(train_alone(SCRIPT, part.args, home=home, name=part.name) for part in parts)))
