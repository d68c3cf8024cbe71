"""Random attacks from a seed on a pool that trains: the shell around `plan`, which ends with the evidence."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from resile_learner.agent.packages import Packages, find_script
from resile_shared.api import JobSummary, JobView
from resile_shared.errors import ResileError, UsageError
from resile_shared.messages.jobs import JobSpec, JobState

from ..client import Client
from ..undisturbed import train_alone
from .assault import Assault
from .attacks import Attack, Kind, Target, What, refusal
from .observation import Observer
from .plan import Card, deal
from .recovery import Recovery
from .verdict import Evidence, Outcome, crowds

LOOK_SECONDS = 0.5
STANDSTILL_SECONDS = 180.0
PUBLISHED_SECONDS = 15.0

Tell = Callable[[str], None]


@dataclass
class Campaign:
    """Attacks the pool of ``assault`` while it trains ``jobs``, all of one kind.

    Each of them is submitted again when it is over.
    """

    assault: Assault
    client: Client
    observer: Observer
    recovery: Recovery
    jobs: list[str]
    """Those that train now."""
    tell: Tell
    accepted: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    crowds: list[str] = field(default_factory=list)
    """When a host was seen with more workers than slots."""
    began: float = field(default_factory=time.time)
    is_hopeless: bool = False
    """A job failed: there is nothing more to find out."""

    async def run(self, *, seed: int, seconds: float, sha256: str | None) -> Evidence:
        """Attack for so long, let the last jobs come to their ends, and collect the evidence. Raises ResileError."""
        spec = await self.client.spec(self.jobs[0])
        for job in self.jobs:
            self._accept(job)
        menu = self._menu()
        await self._trains()
        self.began = time.time()
        async with asyncio.TaskGroup() as tasks:
            attacking = tasks.create_task(self._attack(deal(seed, menu), until=self.began + seconds))
            beside = [tasks.create_task(self._keep_training(spec)), tasks.create_task(self._count_workers())]
            await asyncio.wait({attacking})
            for task in beside:
                task.cancel()
        await self._come_to_their_ends()
        jobs = await self._all_told()
        alone = sha256 or await self._alone(spec)
        outcomes = sorted(self.outcomes, key=lambda outcome: outcome.number)
        return Evidence(tuple(self.accepted), jobs, self.observer.seen, outcomes, alone, tuple(self.crowds))

    def _menu(self) -> list[tuple[Kind, What]]:
        """Return all attacks that this pool allows; those that make sense on others only are told."""
        menu: list[tuple[Kind, What]] = []
        for kind, what in ((kind, what) for kind in Kind for what in What if not refusal(kind, what)):
            try:
                self.assault.check(kind, what)
                if (kind, what) == (Kind.KILL, What.OBJECT_STORE):
                    raise UsageError("kill object-store: nobody would start it again")
                menu.append((kind, what))
            except UsageError as error:
                self.tell(f"left out: {error}")
        return menu

    def _accept(self, job: str) -> None:
        self.accepted.append(job)
        self.observer.follow(job)

    async def _trains(self) -> None:
        """Wait for the first iteration. Raises ResileError."""
        deadline = time.time() + STANDSTILL_SECONDS
        while not any(self.observer.seen.commits.values()):
            if time.time() > deadline:
                raise ResileError(f"{' and '.join(self.jobs)} did not train within {STANDSTILL_SECONDS:.0f} s")
            await asyncio.sleep(LOOK_SECONDS)

    # attacks

    async def _attack(self, cards: Iterable[Card], *, until: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            under_way: set[asyncio.Task[None]] = set()
            for card in cards:
                if card.waits and under_way:
                    await asyncio.wait(under_way)
                    under_way = set()
                await asyncio.sleep(card.pause_seconds)
                if time.time() >= until or self.is_hopeless:
                    return
                if attack := await asyncio.to_thread(self._aim, card):
                    under_way.add(tasks.create_task(self._carry_out(card.number, attack)))
                else:
                    await asyncio.sleep(LOOK_SECONDS)

    def _aim(self, card: Card) -> Attack | None:
        """Choose whom the card hits, of those that are there."""
        match card.what:
            case What.WORKER:
                workers = self.assault.processes.workers()
                names = [f"{worker.job}/{worker.number}" for worker in workers if worker.job in self.jobs]
            case What.AGENT | What.HOST:
                names = sorted(self.assault.processes.hosts())
            case What.JOB | What.OBJECT_STORE:
                names = self.jobs
            case _:
                names = [""]
        if not names:
            return None
        return Attack(card.kind, Target(card.what, names[int(card.pick * len(names))]), seconds=card.seconds)

    async def _carry_out(self, number: int, attack: Attack) -> None:
        try:
            async with self.assault.strike(attack) as struck:
                for job in struck.workers:
                    self.observer.follow(job)
                self._say(f"#{number} {attack}" + (f" ({struck.detail})" if struck.detail else ""))
                recovered = await self.recovery.of(struck)
        except ResileError as error:
            self._say(f"#{number} {attack}: not now: {error}")
            return
        self.outcomes.append(Outcome(number, struck, recovered))
        parts = (f"{p.what} {'NOT' if p.seconds is None else f'{p.seconds:.2f} s'}" for p in recovered)
        self._say(f"#{number} recovered: {', '.join(parts) or 'nothing was hit'}")

    def _say(self, text: str) -> None:
        self.tell(f"{time.time() - self.began:6.1f} s  {text}")

    # jobs

    async def _count_workers(self) -> None:
        """Look at the processes themselves: no host may ever have more workers than slots."""
        slots = {host.id: len(host.slots) for host in await self.client.hosts()}
        while True:
            there = await asyncio.to_thread(self.assault.processes.workers)
            living = [worker for worker in there if Path(f"/proc/{worker.pid}").exists()]  # noqa: ASYNC240 - no disk
            self.crowds += crowds(living, slots)
            await asyncio.sleep(LOOK_SECONDS)

    async def _keep_training(self, spec: JobSpec) -> None:
        """Submit each job again when it is over."""
        while not self.is_hopeless:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                over = [job for job in await self.client.jobs() if job.id in self.jobs and job.state.is_final]
                for job in over:
                    await self._replace(job, spec)
            except ResileError as error:
                self._say(f"the pool does not answer now: {error}")

    async def _replace(self, job: JobSummary, spec: JobSpec) -> None:
        if job.state is not JobState.COMPLETED:
            self._say(f"{job.id} {job.state}: {job.reason}")
            self.is_hopeless = True
            return
        again = await self.client.submit(spec)
        self._accept(again)
        self.jobs[self.jobs.index(job.id)] = again
        self._say(f"{job.id} has completed; it is submitted again: {again}")

    async def _come_to_their_ends(self) -> None:
        """Wait until all jobs are over, or nothing comes any more."""
        self._say("no more attacks; what trains comes to its end")
        known, since = 0, time.time()
        while True:
            try:
                jobs = {job.id: job for job in await self.client.jobs()}
                if all(job not in jobs or jobs[job].state.is_final for job in self.accepted):
                    return
            except ResileError as error:
                self._say(f"the pool does not answer now: {error}")
            num_commits = sum(map(len, self.observer.seen.commits.values()))
            if num_commits != known:
                known, since = num_commits, time.time()
            if time.time() - since > STANDSTILL_SECONDS:
                self._say(f"nothing was committed for {STANDSTILL_SECONDS:.0f} s")
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def _all_told(self) -> Sequence[JobView]:
        """Return the jobs, once all of their histories had time to be published."""
        there = {job.id for job in await self.client.jobs()}
        jobs = [await self.client.job(job) for job in self.accepted if job in there]
        deadline = time.time() + PUBLISHED_SECONDS
        num_items = sum(len(job.history) for job in jobs)
        while time.time() < deadline:
            if sum(event.job in there for event in self.observer.seen.events) >= num_items:
                break
            await asyncio.sleep(LOOK_SECONDS)
        return jobs

    async def _alone(self, spec: JobSpec) -> str:
        self._say("the same training undisturbed, alone on one worker")
        with tempfile.TemporaryDirectory(prefix="resile-chaos-") as folder:
            package = await Packages(self.assault.storage, Path(folder)).fetch(spec.package)
            script = find_script(package, spec.script)
            result = await train_alone(script, spec.args, env=spec.env, home=Path(folder, "home"), name="undisturbed")
        assert result.completed is not None
        return result.completed.params_sha256
