"""Executes a plan of random attacks on a pool that trains, and returns the record."""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from resile_learner.agent.packages import Packages, find_script
from resile_shared.errors import ResileError, UsageError
from resile_shared.http.api import JobSummary, JobView
from resile_shared.messages.jobs import JobSpec, JobState
from resile_shared.storage.objects import StorageError

from ..client import AsyncClient
from ..local.run import train_alone
from .attack_plan import PlannedAttack, choose_attack, planned_attacks
from .attacks import MENU, AttackKind, TargetKind
from .causes import report_effects
from .injector import AttackInjector
from .members import read_commits
from .observation import Observer
from .recovery_watch import RecoveryWatcher
from .requests import Requests
from .storage_attacks import Checkpoints
from .verdict import CampaignRecord, Outcome, Skipped, oversubscribed, stored_sha256

POLL_SECONDS = 0.5
LATE_POLL_SECONDS = 0.1
LATE_ITERATIONS = 20
STORAGE_SECONDS = 5.0
STALL_SECONDS = 180.0
PUBLISHED_SECONDS = 15.0
TRACED_SECONDS = 2.0
"""How long an attack waits for the traces of its effects; a short time, since the next attack is more important."""

Log = Callable[[str], None]


@dataclass
class Campaign:
    """Attacks the pool of ``injector`` while it trains ``jobs``, all of one kind.

    Each of them is submitted again when it completes.
    """

    injector: AttackInjector
    client: AsyncClient
    observer: Observer
    recovery: RecoveryWatcher
    jobs: list[str]
    """The ids of the jobs that are training now."""
    log: Log
    account: Path | None = None
    """The file to which the members of the jobs write what they commit."""
    only: frozenset[str] = frozenset()
    """The attacks to choose from; empty: all."""
    accepted: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    oversubscribed: list[str] = field(default_factory=list)
    """A description of each time that a host was seen with more workers than slots."""
    torn: set[tuple[str, int]] = field(default_factory=set)
    """Jobs and iterations of checkpoints that were seen with a manifest and without all their parts."""
    skipped: list[Skipped] = field(default_factory=list)
    """Attacks that could not be carried out."""
    stopped: set[str] = field(default_factory=set)
    """Jobs that were stopped on purpose."""
    began: float = field(default_factory=time.time)
    is_aborted: bool = False
    """Whether a job failed, so that the campaign stops attacking."""

    async def run(self, *, seed: int, seconds: float, sha256: str | None) -> CampaignRecord:
        """Attack for ``seconds``, wait until the last jobs complete, and return the record. Raises ResileError."""
        spec = await self.client.spec(self.jobs[0])
        for job in self.jobs:
            self._accept(job)
        if not (possible := self._possible_attacks()):
            raise UsageError("none of these attacks is possible on this pool")
        await self._wait_for_training()
        self.began = time.time()
        async with asyncio.TaskGroup() as tasks:
            attacking = tasks.create_task(self._attack(planned_attacks(seed, possible), until=self.began + seconds))
            watching = (self._keep_training(spec), self._count_workers(), self._check_storage())
            beside = [tasks.create_task(watch) for watch in watching]
            await asyncio.wait({attacking})
            for task in beside:
                task.cancel()
        await self._wait_for_completion()
        jobs = await self._collect_jobs()
        models = {job.id: await self._hash_model(job.id) for job in jobs if job.state is JobState.COMPLETED}
        members = read_commits(self.account.read_text()) if self.account and self.account.exists() else None
        return CampaignRecord(
            tuple(self.accepted),
            jobs,
            self.observer.seen,
            sorted(self.outcomes, key=lambda outcome: outcome.number),
            sha256 or await self._train_undisturbed(spec),
            tuple(self.oversubscribed),
            members,
            agent_logs=dict(self._agent_logs()),
            models=models,
            torn=frozenset(self.torn),
            skipped=tuple(self.skipped),
        )

    def _possible_attacks(self) -> list[tuple[AttackKind, TargetKind]]:
        """Return all attacks that are possible on this pool; log the others."""
        possible: list[tuple[AttackKind, TargetKind]] = []
        for kind, what in MENU:
            if self.only and f"{kind} {what}" not in self.only:
                continue
            try:
                self.injector.check(kind, what)
                if (kind, what) == (AttackKind.KILL, TargetKind.OBJECT_STORE) and self.injector.own_store is None:
                    raise UsageError("kill object-store: nothing would restart it")
                possible.append((kind, what))
            except UsageError as error:
                self._skip(f"{kind} {what}", str(error))
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
                under_way.add(tasks.create_task(self._carry_out(planned, until=until)))

    async def _carry_out(self, planned: PlannedAttack, *, until: float) -> None:
        number = planned.number
        try:
            jobs = [await self._job_that_ends(until)] if planned.kind is AttackKind.KILL_LATE else self.jobs
            attack = await asyncio.to_thread(choose_attack, planned, jobs, self.injector.processes)
            if attack.kind is AttackKind.STOP:
                self.stopped.add(attack.target.job)
            inject = Requests(self.client, self.injector).inject if attack.kind.is_request else self.injector.inject
            async with inject(attack) as injected:
                for job in injected.workers:
                    self.observer.follow(job)
                self._log(f"#{number} {attack}" + (f" ({injected.detail})" if injected.detail else ""))
                recovered = await self.recovery.wait(injected)
            traces = await report_effects(self.client, injected, self.observer.seen, patience=TRACED_SECONDS)
        except ResileError as error:
            self._skip(f"{planned.kind} {planned.what}", str(error), number=number)
            return
        self.outcomes.append(Outcome(number, injected, recovered, traces))
        parts = (f"{p.what} {'NOT' if p.seconds is None else f'{p.seconds:.2f} s'}" for p in recovered)
        self._log(f"#{number} recovered: {', '.join(parts) or 'no victim'}")

    async def _job_that_ends(self, until: float) -> str:
        """Wait for the last iterations of a job; return it. Raises ResileError."""
        while time.time() < until:
            for job in await self.client.jobs():
                left = (job.iterations_total or LATE_ITERATIONS + 1) - job.iteration
                if job.id in self.jobs and not job.state.is_final and left <= LATE_ITERATIONS:
                    return job.id
            await asyncio.sleep(LATE_POLL_SECONDS)
        raise ResileError("no job ended before the campaign did")

    def _skip(self, attack: str, reason: str, *, number: int | None = None) -> None:
        self.skipped.append(Skipped(attack, reason))
        self._log(f"{'' if number is None else f'#{number} '}{attack}: skipped: {reason}")

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

    async def _check_storage(self) -> None:
        """Look at the stored checkpoints: each must be whole, unless it was damaged on purpose."""
        while True:
            for job in self.jobs:
                with contextlib.suppress(StorageError):  # it is full, or frozen
                    found = await asyncio.to_thread(Checkpoints(self.injector.storage, job).torn)
                    self.torn |= {(job, iteration) for iteration in found}
            await asyncio.sleep(STORAGE_SECONDS)

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
        if job.state is not JobState.COMPLETED and not (job.state is JobState.STOPPED and job.id in self.stopped):
            self._log(f"{job.id} {job.state}: {job.reason}")
            self.is_aborted = True
            return
        again = await self.client.submit(spec)
        self._accept(again)
        self.jobs[self.jobs.index(job.id)] = again
        self._log(f"{job.id} {job.state}, submitted again as {again}")

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

    async def _hash_model(self, job: str) -> str:
        """Return the sha256 of the stored model of a job, or what is wrong with it."""
        with tempfile.TemporaryDirectory(prefix="resile-chaos-") as folder:
            file = Path(folder, "model.safetensors")
            try:
                await self.client.save_model(job, file)
                return await asyncio.to_thread(stored_sha256, file)
            except (ResileError, ValueError, KeyError) as error:
                return f"none: {error}"

    def _agent_logs(self) -> Iterator[tuple[str, str]]:
        """Yield the log of each host's agent, with what was moved aside."""
        for log in sorted((self.injector.home / "logs").glob("host-*.log")):
            parts = [part for part in (log.with_suffix(".log.old"), log) if part.exists()]
            yield log.stem, "".join(part.read_text(errors="replace") for part in parts)

    async def _train_undisturbed(self, spec: JobSpec) -> str:
        self._log("training the same package undisturbed on one worker")
        with tempfile.TemporaryDirectory(prefix="resile-chaos-") as folder:
            package = Path(folder, "code")
            await Packages(self.injector.storage, Path(folder)).unpack(spec.package, package)
            script = find_script(package, spec.script)
            result = await train_alone(script, spec.args, env=spec.env, home=Path(folder, "home"), name="undisturbed")
        assert result.completed is not None
        return result.completed.params_sha256
