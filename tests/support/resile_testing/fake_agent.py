"""A fake agent: it speaks the real protocol on the bus, but its workers are entries in a table.

A worker is ready as soon as it is allocated; a generation trains as soon as it has all addresses, and workers that are
not members leave. Nothing is trained: the test decides when a job completes, fails or saves a checkpoint.
"""

import asyncio
from contextlib import aclosing
from datetime import UTC, datetime

from resile_shared.bus import subjects
from resile_shared.bus.client import Bus
from resile_shared.bus.envelope import Received
from resile_shared.bus.subjects import ALLOCATIONS
from resile_shared.messages.allocations import Allocation, Placement
from resile_shared.messages.hosts import Address, Heartbeat, HostGoodbye, HostHello, Slot, WorkerExit, WorkerReport
from resile_shared.messages.instructions import AssignJobs, Instruction, PauseWorkers, SendHeartbeat, StopWorkers
from resile_shared.messages.reports import (
    CheckpointSaved,
    Completed,
    Content,
    EpochCount,
    PeerSuspected,
    Ready,
    Report,
    Switched,
)
from resile_shared.version import VERSION


class FakeAgent:
    """The agent of one host, inside its context. Leaving the context makes it fall silent."""

    def __init__(
        self, bus: Bus, host: str, *, slots: int, incarnation: int = 1, num_shards: int = 24, version: str = VERSION
    ) -> None:
        self.bus = bus
        self.host = host
        self.slots = slots
        self.incarnation = incarnation
        self.num_shards = num_shards
        self.version = version
        self.workers: dict[tuple[str, int], WorkerReport] = {}
        self.assigned: tuple[str, ...] | None = None
        """The jobs whose allocations the agent watches; None until the scheduler has assigned them."""
        self.allocations: dict[str, Allocation] = {}
        self.seen: list[Allocation] = []
        """All allocations, in order of arrival."""
        self.iteration = 0
        self.beat_seconds = 0.5
        self.num_heartbeats_requested = 0
        """How often the agent was asked for a heartbeat."""
        self._beats = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._watches: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> "FakeAgent":
        hello = HostHello(
            host=self.host,
            incarnation=self.incarnation,
            address="127.0.0.1",
            slots=tuple(Slot(index=index) for index in range(self.slots)),
            device_class="cpu",
            version=self.version,
        )
        await self.bus.publish(subjects.host_event(self.host, "hello"), hello)
        self._subscription = await self.bus.subscribe(subjects.instruction(self.host), Instruction, self._instructed)
        self._tasks = {asyncio.create_task(self._send_heartbeats())}
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.vanish()

    async def vanish(self) -> None:
        """Stop all messages, like a host that loses power."""
        if not self._tasks:
            return
        tasks = self._tasks
        self._tasks = set()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        failed = [error for task in tasks if not task.cancelled() and (error := task.exception())]
        await self._subscription.unsubscribe()
        if failed:
            raise BaseExceptionGroup(f"the agent of {self.host} failed", failed)

    async def goodbye(self) -> None:
        """Leave the pool."""
        goodbye = HostGoodbye(host=self.host, incarnation=self.incarnation)
        await self.bus.publish(subjects.host_event(self.host, "goodbye"), goodbye)
        await self.vanish()

    async def beat(self) -> None:
        """Send a heartbeat now."""
        self._beats += 1
        beat = Heartbeat(
            host=self.host,
            incarnation=self.incarnation,
            number=self._beats,
            jobs=self.assigned,
            workers=tuple(self.workers.values()),
        )
        await self.bus.send(subjects.heartbeat(self.host), beat)
        for (job, worker), report in list(self.workers.items()):
            if report.state == "gone" and not self._is_named(job, worker):
                del self.workers[job, worker]

    async def report(self, job: str, worker: int, content: Content) -> None:
        """Publish a report of ``worker``."""
        known = self.workers[job, worker]
        report = Report(
            job=job,
            host=self.host,
            incarnation=self.incarnation,
            worker=worker,
            slot=known.slot,
            generation=known.generation,
            time=datetime.now(UTC),
            content=content,
        )
        if isinstance(content, PeerSuspected):
            await self.bus.send(subjects.suspicion(job), report)
        else:
            await self.bus.publish(subjects.report(job, content.kind), report)

    async def complete(self, job: str, *, epochs: int = 0) -> None:
        """Complete the job after ``epochs``: report it if the lowest rank is here, and end all workers here."""
        if (first := self._lowest_rank(job)) is not None:
            completed = Completed(
                iteration=self.iteration,
                epoch=1,
                samples_seen=0,
                loss=None,
                metrics={},
                validation={},
                params_sha256="0" * 64,
                model=None,
                ledger=tuple(EpochCount(epoch=epoch, samples=1, once=1, more=0, never=0) for epoch in range(epochs)),
                bits="same bits",
            )
            await self.report(job, first, completed)
        for name, worker in list(self.workers):
            if name == job:
                self._end(job, worker, WorkerExit(kind="finished"))
        await self.beat()

    async def _send_heartbeats(self) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(self.beat_seconds)

    def _assign(self, jobs: tuple[str, ...]) -> None:
        self.assigned = jobs
        for job in self._watches.keys() - set(jobs):
            self._watches.pop(job).cancel()
            self.allocations.pop(job, None)
        for job in set(jobs) - self._watches.keys():
            self._watches[job] = asyncio.create_task(self._watch_allocation(job))
            self._tasks.add(self._watches[job])

    async def _watch_allocation(self, job: str) -> None:
        async with aclosing(self.bus.bucket(ALLOCATIONS).watch(job)) as batches:
            async for changes in batches:
                for change in changes:
                    if change.value is not None:
                        await self._allocated(change.value)

    async def _allocated(self, allocation: Allocation) -> None:
        self.seen.append(allocation)
        job = allocation.job
        self.allocations[job] = allocation
        for placement in self._own(allocation):
            if (job, placement.worker) not in self.workers and placement.address is None:
                await self._start(job, placement)
        if allocation.placements and allocation.has_addresses:
            await self._switch(allocation)
        elif not allocation.placements:
            for name, worker in list(self.workers):
                if name == job:
                    self._end(job, worker, WorkerExit(kind="exited"))
        await self.beat()

    async def _start(self, job: str, placement: Placement) -> None:
        here = [key for key, known in self.workers.items() if known.slot == placement.slot and known.state != "gone"]
        assert not here, f"{placement.slot_name} is allocated to a worker of {job}, but held by {here}"
        self.workers[job, placement.worker] = WorkerReport(
            job=job,
            worker=placement.worker,
            slot=placement.slot,
            state="ready",
            address=Address(host="127.0.0.1", port=1000 + placement.worker),
        )
        ready = Ready(
            iterations_total=100, num_shards=self.num_shards, batch_size=192, epochs=1, samples=19200, bits="same bits"
        )
        await self.report(job, placement.worker, ready)

    async def _switch(self, order: Allocation) -> None:
        job = order.job
        named = {placement.worker for placement in order.placements}
        for name, worker in list(self.workers):
            if name == job and worker not in named:
                self._end(job, worker, WorkerExit(kind="left"))
        for placement in self._own(order):
            known = self.workers.get((job, placement.worker))
            if known is not None and known.state != "gone":
                update = {"state": "member", "generation": order.generation, "iteration": self.iteration}
                self.workers[job, placement.worker] = known.model_copy(update=update)
        if (first := self._lowest_rank(job)) is not None:
            workers = tuple(placement.worker for placement in order.placements)
            await self.report(job, first, Switched(workers=workers, iteration=self.iteration))

    async def _instructed(self, received: Received[Instruction]) -> None:
        match received.message.root:
            case AssignJobs(incarnation=self.incarnation, jobs=jobs):
                self._assign(jobs)
            case StopWorkers(job=job, incarnation=self.incarnation, workers=workers):
                for worker in workers:
                    self._stop(job, worker)
                await self.beat()
            case SendHeartbeat(incarnation=self.incarnation):
                self.num_heartbeats_requested += 1
                await self.beat()
            case PauseWorkers(job=job, lineage=lineage):
                first = self._lowest_rank(job)
                if first is not None and self.allocations[job].lineage == lineage:
                    saved = CheckpointSaved(lineage=lineage, iteration=self.iteration, num_bytes=1, pausing=True)
                    await self.report(job, first, saved)
            case _:
                pass

    def _stop(self, job: str, worker: int) -> None:
        if (job, worker) in self.workers:
            self._end(job, worker, WorkerExit(kind="exited"))
        else:
            gone = WorkerReport(job=job, worker=worker, slot=0, state="gone", exit=WorkerExit(kind="not started"))
            self.workers[job, worker] = gone

    def _end(self, job: str, worker: int, how: WorkerExit) -> None:
        known = self.workers[job, worker]
        if known.state != "gone":
            self.workers[job, worker] = known.model_copy(update={"state": "gone", "exit": how})

    def _own(self, allocation: Allocation) -> list[Placement]:
        return [p for p in allocation.placements if (p.host, p.incarnation) == (self.host, self.incarnation)]

    def _is_named(self, job: str, worker: int) -> bool:
        allocation = self.allocations.get(job)
        return allocation is not None and any(placement.worker == worker for placement in self._own(allocation))

    def _lowest_rank(self, job: str) -> int | None:
        """Return the job's first worker if it is here and lives."""
        allocation = self.allocations.get(job)
        if allocation is None or not allocation.placements:
            return None
        first = allocation.placements[0]
        known = self.workers.get((job, first.worker)) if first in self._own(allocation) else None
        return first.worker if known is not None and known.state != "gone" else None
