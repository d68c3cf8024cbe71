"""A scheduler played by hand, and agents as processes of their own, for tests of the agent's service."""

import asyncio
import hashlib
import io
import os
import signal
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resile_shared.bus import subjects
from resile_shared.bus.client import Bus
from resile_shared.bus.envelope import Received
from resile_shared.bus.subjects import ALLOCATIONS, EVENTS, HOSTS, JOBS, LOGS, PROGRESS, REPORTS
from resile_shared.messages.allocations import Allocation, Placement
from resile_shared.messages.hosts import (
    Heartbeat,
    HostGoodbye,
    HostHello,
    HostRecord,
    HostState,
    WorkerExit,
    WorkerReport,
)
from resile_shared.messages.instructions import AssignJobs, Instruction
from resile_shared.messages.jobs import JobRecord, JobSpec, JobState
from resile_shared.messages.logs import LogLines
from resile_shared.messages.message import at
from resile_shared.messages.pool import PoolSettings
from resile_shared.messages.reports import Report
from resile_shared.pool_settings import store_pool_settings
from resile_shared.version import VERSION
from resile_testing.fixtures import Pool
from resile_testing.waiting import PATIENCE_SECONDS

HOST = "host-1"


async def until(condition: Callable[[], object], *, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for something that another process brings about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.02)


class Stage:
    """The bus with all that an agent says on it, the pool's storage, and a pen to write allocations with."""

    def __init__(self, pool: Pool, folder: Path, *, scheduler: Bus, monitor: Bus, registry: Bus) -> None:
        self.pool = pool
        self.bus = scheduler
        self.folder = folder
        self.storage = folder / "storage"
        self.beats: list[Heartbeat] = []
        self.reports: list[Report] = []
        self.goodbyes: list[int] = []
        self.hurry = folder / "hurry"
        self.hellos: list[HostHello] = []
        self.lines: list[tuple[int, str]] = []
        self.revisions: dict[str, int] = {}
        self.newest: dict[str, Allocation] = {}
        self.agents: list[asyncio.subprocess.Process] = []
        self._monitor = monitor
        self._registry = registry
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def open(cls, pool: Pool, folder: Path) -> "Stage":
        stage = cls(pool, folder, **{role: await pool.bus(role) for role in ("scheduler", "monitor", "registry")})
        stage.storage.mkdir()
        await store_pool_settings(stage._registry, PoolSettings(detection_seconds=3.0, version=VERSION))
        (stage.storage / "probe").write_text("this pool's")
        await stage.bus.subscribe(subjects.HEARTBEATS, Heartbeat, stage._beat)
        await stage.bus.subscribe(subjects.SUSPICIONS, Report, stage._report)
        follow = stage._monitor.follow
        for reading in (
            follow(REPORTS, Report, stage._report),
            follow(PROGRESS, Report, stage._report),
            follow(LOGS, LogLines, stage._log),
            follow(EVENTS, HostHello, stage._hello, subjects=(subjects.HELLOS,)),
            follow(EVENTS, HostGoodbye, stage._goodbye, subjects=(subjects.GOODBYES,)),
        ):
            stage._tasks.append(asyncio.create_task(reading))
        return stage

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for agent in self.agents:
            if agent.returncode is None:
                agent.kill()
                await agent.wait()

    async def _beat(self, received: Received[Heartbeat]) -> None:
        self.beats.append(received.message)
        if self.newest:  # else a real scheduler does that
            await self._assign(received.message)

    async def _assign(self, beat: Heartbeat) -> None:
        """Assign to the host the jobs that have workers there, or are placed there, until its heartbeats name them."""
        jobs = {job for job, allocation in self.newest.items() if allocation.placements}
        jobs |= {worker.job for worker in beat.workers if worker.state != "gone"}
        if beat.jobs is None or set(beat.jobs) != jobs:
            assign = AssignJobs(epoch=1, incarnation=beat.incarnation, jobs=tuple(sorted(jobs)))
            await self.bus.send(subjects.instruction(beat.host), Instruction(assign))

    async def _report(self, received: Received[Report]) -> None:
        self.reports.append(received.message)

    async def _hello(self, received: Received[HostHello]) -> None:
        self.hellos.append(received.message)

    async def _goodbye(self, received: Received[HostGoodbye]) -> None:
        self.goodbyes.append(received.message.incarnation)

    async def _log(self, received: Received[LogLines]) -> None:
        self.lines += ((received.message.worker, line.text) for line in received.message.lines)

    # agents

    async def start_agent(self, *flags: str, stderr: int | None = None) -> asyncio.subprocess.Process:
        command = [
            sys.executable,
            "-m",
            "resile_learner",
            "--credentials",
            str(self.pool.server.credentials("learner")),
        ]
        command += ["--folder", str(self.folder / "agent"), "--storage", self.storage.as_uri()]
        command += ["--host", HOST, "--slots", "4", *flags]
        environment = {**os.environ, "RESILE_LOG_LEVEL": "warning"}
        agent = await asyncio.create_subprocess_exec(*command, env=environment, stderr=stderr)
        self.agents.append(agent)
        return agent

    async def end_agent(self, agent: asyncio.subprocess.Process, number: signal.Signals) -> int:
        agent.send_signal(number)
        return await agent.wait()

    # what a scheduler does

    def store_package(self, files: dict[str, str]) -> str:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for name, text in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(text.encode())
                archive.addfile(member, io.BytesIO(text.encode()))
        key = f"packages/{hashlib.sha256(packed.getvalue()).hexdigest()}.tar.gz"
        path = self.storage / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(packed.getvalue())
        return key

    async def submit(self, job: str, script: str = "", *, package: str = "", **spec: Any) -> None:
        package = package or self.store_package({"train.py": script})
        record = JobRecord(
            job=job,
            spec=JobSpec(name=job, package=package, script="train.py", **spec),
            state=JobState.STARTING,
            priority=5000,
            submitted=at(time.time()),
        )
        await self.bus.bucket(JOBS).create(job, record)

    async def place(self, job: str, generation: int, workers: tuple[int, ...], **fields: Any) -> Allocation:
        """Write an allocation; a worker's slot is its number, if no ``slot`` is given."""
        await until(lambda: self.hellos)
        slot, incarnation = fields.pop("slot", None), self.hellos[-1].incarnation
        placements = tuple(
            Placement(worker=worker, host=HOST, incarnation=incarnation, slot=worker if slot is None else slot)
            for worker in workers
        )
        allocation = Allocation(
            job=job, epoch=1, generation=generation, placements=placements, secret="secret", **fields
        )
        await self._write(allocation)
        return allocation

    async def allocate(self, job: str, generation: int, workers: tuple[int, ...], **fields: Any) -> None:
        """Write an allocation, and write it again as an order once all its workers can be reached."""
        allocation = await self.place(job, generation, workers, **fields)
        if workers:
            await until(lambda: all(self.worker(job, worker).address for worker in workers))
            named = tuple(
                placement.model_copy(update={"address": self.worker(job, placement.worker).address})
                for placement in allocation.placements
            )
            await self._write(allocation.model_copy(update={"placements": named}))

    async def upgrade(self) -> None:
        """Have a registry of another version store its settings, and refuse the newest hello."""
        await store_pool_settings(self._registry, PoolSettings(detection_seconds=3.0, version="9.9.9"))
        await self.store_host(HostState.LEFT)

    async def store_host(self, state: HostState) -> None:
        """Write what the registry would make of the newest hello."""
        hello = self.hellos[-1]
        await self._registry.bucket(HOSTS).create(HOST, HostRecord(**hello.model_dump(), state=state, since=at(0.0)))

    async def _write(self, allocation: Allocation) -> None:
        bucket = self.bus.bucket(ALLOCATIONS)
        job = allocation.job
        self.newest[job] = allocation
        if revision := self.revisions.get(job):
            self.revisions[job] = await bucket.update(job, allocation, revision=revision)
        else:
            self.revisions[job] = await bucket.create(job, allocation)

    # what it knows

    def worker(self, job: str, number: int) -> WorkerReport:
        """One worker in the newest heartbeat that lists it."""
        for beat in reversed(self.beats):
            for worker in beat.workers:
                if (worker.job, worker.worker) == (job, number):
                    return worker
        return WorkerReport(job=job, worker=number, slot=0, state="starting")

    def exit(self, job: str, number: int) -> WorkerExit:
        """How a worker ended."""
        exit_ = self.worker(job, number).exit
        assert exit_ is not None
        return exit_

    def pids(self) -> list[int]:
        """Process ids that workers have printed."""
        return [int(line.split()[1]) for _, line in self.lines if line.startswith("pid ")]

    def variables(self) -> dict[str, str]:
        """Environment of a job that trains slowly until `hurry` is there."""
        return {"COLOR": "blue", "HURRY": str(self.hurry)}

    def said(self, job: str, kind: str) -> list[Report]:
        return [report for report in self.reports if report.job == job and report.content.kind == kind]
