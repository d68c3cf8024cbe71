"""Executes a plan of random attacks on a pool that trains, and returns the record."""

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
from .attacks import Attack, AttackKind, Target, TargetKind, refusal
from .injector import AttackInjector
from .observation import Observer
from .plan import PlannedAttack, planned_attacks
from .recovery import RecoveryWatcher
from .verdict import CampaignRecord, Outcome, oversubscribed

POLL_SECONDS = 0.5
STALL_SECONDS = 180.0
PUBLISHED_SECONDS = 15.0

Log = Callable[[str], None]


@dataclass
class Campaign:
    """Attacks the pool of ``injector`` while it trains ``jobs``, all of one kind.

    Each of them is submitted again when it completes.
    """

    injector: AttackInjector
    client: Client
    observer: Observer
    recovery: RecoveryWatcher
    jobs: list[str]
    """The current ones."""
    log: Log
    accepted: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    oversubscribed: list[str] = field(default_factory=list)
    """When a host was seen with more workers than slots."""
    began: float = field(default_factory=time.time)
    is_aborted: bool = False
    """A job failed: the campaign stops attacking."""

    async def run(self, *, seed: int, seconds: float, sha256: str | None) -> CampaignRecord:
        """Attack for ``seconds``, wait until the last jobs complete, and return the record. Raises ResileError."""
        spec = await self.client.spec(self.jobs[0])
        for job in self.jobs:
            self._accept(job)
        possible = self._possible_attacks()
        await self._wait_for_training()
        self.began = time.time()
        async with asyncio.TaskGroup() as tasks:
            attacking = tasks.create_task(self._attack(planned_attacks(seed, possible), until=self.began + seconds))
            beside = [tasks.create_task(self._keep_training(spec)), tasks.create_task(self._count_workers())]
            await asyncio.wait({attacking})
            for task in beside:
                task.cancel()
        await self._wait_for_completion()
        jobs = await self._collect_jobs()
        alone = sha256 or await self._train_undisturbed(spec)
        outcomes = sorted(self.outcomes, key=lambda outcome: outcome.number)
        return CampaignRecord(
            tuple(self.accepted), jobs, self.observer.seen, outcomes, alone, tuple(self.oversubscribed)
        )

    def _possible_attacks(self) -> list[tuple[AttackKind, TargetKind]]:
        """Return all attacks that are possible on this pool; log the others."""
        possible: list[tuple[AttackKind, TargetKind]] = []
        for kind, what in ((kind, what) for kind in AttackKind for what in TargetKind if not refusal(kind, what)):
            try:
                self.injector.check(kind, what)
                if (kind, what) == (AttackKind.KILL, TargetKind.OBJECT_STORE):
                    raise UsageError("kill object-store: nothing would restart it")
                possible.append((kind, what))
            except UsageError as error:
                self.log(f"skipping {error}")
        return possible

    def _accept(self, job: str) -> None:
        self.accepted.append(job)
        self.observer.follow(job)

    async def _wait_for_training(self) -> None:
        """Wait for the first iteration. Raises ResileError."""
        deadline = time.time() + STALL_SECONDS
        while not any(self.observer.seen.commits.values()):
            if time.time() > deadline:
                raise ResileError(
                    f"no iteration of {' or '.join(self.jobs)} was committed within {STALL_SECONDS:.0f} s"
                )
            await asyncio.sleep(POLL_SECONDS)

    # attacks

    async def _attack(self, plan: Iterable[PlannedAttack], *, until: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            under_way: set[asyncio.Task[None]] = set()
            for planned in plan:
                if planned.waits and under_way:
                    await asyncio.wait(under_way)
                    under_way = set()
                await asyncio.sleep(planned.pause_seconds)
                if time.time() >= until or self.is_aborted:
                    return
                if attack := await asyncio.to_thread(self._choose_target, planned):
                    under_way.add(tasks.create_task(self._carry_out(planned.number, attack)))
                else:
                    await asyncio.sleep(POLL_SECONDS)

    def _choose_target(self, planned: PlannedAttack) -> Attack | None:
        """Choose the target among those that are running."""
        match planned.what:
            case TargetKind.WORKER:
                workers = self.injector.processes.workers()
                names = [f"{worker.job}/{worker.number}" for worker in workers if worker.job in self.jobs]
            case TargetKind.AGENT | TargetKind.HOST:
                names = sorted(self.injector.processes.hosts())
            case TargetKind.JOB | TargetKind.OBJECT_STORE:
                names = self.jobs
            case _:
                names = [""]
        if not names:
            return None
        return Attack(
            planned.kind, Target(planned.what, names[int(planned.pick * len(names))]), seconds=planned.seconds
        )

    async def _carry_out(self, number: int, attack: Attack) -> None:
        try:
            async with self.injector.inject(attack) as injected:
                for job in injected.workers:
                    self.observer.follow(job)
                self._log(f"#{number} {attack}" + (f" ({injected.detail})" if injected.detail else ""))
                recovered = await self.recovery.wait(injected)
        except ResileError as error:
            self._log(f"#{number} {attack}: skipped: {error}")
            return
        self.outcomes.append(Outcome(number, injected, recovered))
        parts = (f"{p.what} {'NOT' if p.seconds is None else f'{p.seconds:.2f} s'}" for p in recovered)
        self._log(f"#{number} recovered: {', '.join(parts) or 'no victim'}")

    def _log(self, text: str) -> None:
        self.log(f"{time.time() - self.began:6.1f} s  {text}")

    # jobs

    async def _count_workers(self) -> None:
        """Poll the processes: no host may ever have more workers than slots."""
        slots = {host.id: len(host.slots) for host in await self.client.hosts()}
        while True:
            there = await asyncio.to_thread(self.injector.processes.workers)
            living = [worker for worker in there if Path(f"/proc/{worker.pid}").exists()]  # noqa: ASYNC240 - no disk
            self.oversubscribed += oversubscribed(living, slots)
            await asyncio.sleep(POLL_SECONDS)

    async def _keep_training(self, spec: JobSpec) -> None:
        """Submit each job again when it completes."""
        while not self.is_aborted:
            await asyncio.sleep(POLL_SECONDS)
            try:
                over = [job for job in await self.client.jobs() if job.id in self.jobs and job.state.is_final]
                for job in over:
                    await self._replace(job, spec)
            except ResileError as error:
                self._log(f"the pool does not answer: {error}")

    async def _replace(self, job: JobSummary, spec: JobSpec) -> None:
        if job.state is not JobState.COMPLETED:
            self._log(f"{job.id} {job.state}: {job.reason}")
            self.is_aborted = True
            return
        again = await self.client.submit(spec)
        self._accept(again)
        self.jobs[self.jobs.index(job.id)] = again
        self._log(f"{job.id} completed, submitted again as {again}")

    async def _wait_for_completion(self) -> None:
        """Wait until all jobs have ended, or no job makes progress."""
        self._log("no more attacks, waiting until all jobs complete")
        known, since = 0, time.time()
        while True:
            try:
                jobs = {job.id: job for job in await self.client.jobs()}
                if all(job not in jobs or jobs[job].state.is_final for job in self.accepted):
                    return
            except ResileError as error:
                self._log(f"the pool does not answer: {error}")
            num_commits = sum(map(len, self.observer.seen.commits.values()))
            if num_commits != known:
                known, since = num_commits, time.time()
            if time.time() - since > STALL_SECONDS:
                self._log(f"no iteration was committed for {STALL_SECONDS:.0f} s")
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _collect_jobs(self) -> Sequence[JobView]:
        """Return the jobs, after their histories had time to be published."""
        there = {job.id for job in await self.client.jobs()}
        jobs = [await self.client.whole_job(job) for job in self.accepted if job in there]
        deadline = time.time() + PUBLISHED_SECONDS
        num_items = sum(len(job.history) for job in jobs)
        while time.time() < deadline:
            if sum(event.job in there for event in self.observer.seen.events) >= num_items:
                break
            await asyncio.sleep(POLL_SECONDS)
        return jobs

    async def _train_undisturbed(self, spec: JobSpec) -> str:
        self._log("training the same package undisturbed on one worker")
        with tempfile.TemporaryDirectory(prefix="resile-chaos-") as folder:
            package = Path(folder, "code")
            await Packages(self.injector.storage, Path(folder)).unpack(spec.package, package)
            script = find_script(package, spec.script)
            result = await train_alone(script, spec.args, env=spec.env, home=Path(folder, "home"), name="undisturbed")
        assert result.completed is not None
        return result.completed.params_sha256
