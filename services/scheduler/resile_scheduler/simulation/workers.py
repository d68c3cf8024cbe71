"""What the workers of simulated jobs do: start, join at a boundary, train, leave, recover, complete.

Iterations are not simulated one by one, only the boundaries at which something happens.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from resile_shared.messages.allocations import Allocation
from resile_shared.messages.hosts import Address
from resile_shared.messages.message import at
from resile_shared.messages.reports import (
    CheckpointSaved,
    Completed,
    Content,
    Measurement,
    PeerSuspected,
    Progress,
    Report,
    Switched,
)

from .agents import SimulatedAgents
from .job import CLOCK_RESOLUTION, RESOLUTION, Position, SimulatedJob, SimulatedWorker, Stretch
from .timeline import Timeline

ACCUSE_AGAIN_SECONDS = 1.0
NUM_MEASURED = 5
"""How many iterations of a stretch are measured, after its first."""


@dataclass(frozen=True)
class Delays:
    """How long things take, in seconds."""

    fork: float = 0.03
    script: float = 0.8
    """The time from the fork to the training call."""
    exit: float = 0.05
    change: float = 0.0
    """How long a job pauses when its workers change. Starting other workers can cost it the same.

    A batch that changes alone costs nothing.
    """
    detection: float = 3.0
    """The silence after which a host is lost."""


class SimulatedWorkers:
    """The workers of all jobs."""

    def __init__(
        self, timeline: Timeline, agents: SimulatedAgents, send: Callable[[Report], None], delays: Delays
    ) -> None:
        self._timeline = timeline
        self._agents = agents
        self._send = send
        self._delays = delays
        self.jobs: dict[str, SimulatedJob] = {}

    # what agents do with them

    def allocate(self, job: SimulatedJob, allocation: Allocation) -> None:
        """Act as the agents: start the workers that are new, pass the order to all."""
        before = {placement.worker for placement in job.allocation.placements} if job.allocation else set()
        is_new_life = allocation.cold_start and before.isdisjoint(
            placement.worker for placement in allocation.placements
        )
        if is_new_life or not allocation.placements:
            self._begin_life(job, allocation)
        job.allocation = allocation
        self._start(job, allocation)
        if allocation.is_recovery:
            self._recover(job, allocation)
        elif allocation.placements and allocation.has_addresses:
            job.orders.append(allocation)
            self._on_formed(job)

    def pause(self, job: SimulatedJob) -> None:
        """Let the members stop at their next boundary, with a checkpoint."""
        job.is_pausing = True
        self._schedule_boundary(job)

    def exit(self, job: SimulatedJob, number: int, kind: str) -> None:
        """End a worker now; if it is a member, the round in flight never ends."""
        worker = job.workers.pop(number, None)
        if worker is not None:
            self._agents.end(worker, kind)
            self._on_lost(job, number)

    def stop(self, job: SimulatedJob, host: str, numbers: Iterable[int]) -> None:
        """End workers because their agent was told to; it reports those that it never had as gone, not started."""
        unknown = []
        for number in numbers:
            if number in job.workers:
                self.exit(job, number, "exited")
            else:
                unknown.append(SimulatedWorker(job, number, host, slot=0))
        self._agents.report_unknown(host, unknown)

    def lose_host(self, host: str) -> None:
        """End all workers of a host."""
        for worker in self._agents.end_all(host):
            if worker.job.workers.pop(worker.number, None):
                self._on_lost(worker.job, worker.number)

    def remove(self, job: str) -> None:
        """Forget a job."""
        self.jobs.pop(job).is_removed = True

    def _begin_life(self, job: SimulatedJob, allocation: Allocation) -> None:
        job.stop_training(self._timeline.now)
        job.members, job.orders, job.is_pausing = (), [], False
        job.life += 1
        first = Position(0, 0.0, job.submission.training.batch_size)
        job.iteration, job.done, job.batch_size = (allocation.resume and job.checkpoint) or first
        job.lineage = allocation.lineage
        job.is_complete = False

    def _start(self, job: SimulatedJob, allocation: Allocation) -> None:
        started: dict[str, list[SimulatedWorker]] = {}
        for placement in allocation.placements:
            if placement.worker not in job.started:
                job.started.add(placement.worker)
                worker = SimulatedWorker(job, placement.worker, placement.host, placement.slot)
                job.workers[worker.number] = worker
                self._agents.start(worker)
                started.setdefault(worker.host, []).append(worker)
        for host, workers in started.items():
            self._timeline.later(self._delays.fork, partial(self._on_listening, job, host, workers))

    def _on_listening(self, job: SimulatedJob, host: str, workers: list[SimulatedWorker]) -> None:
        alive = [worker for worker in workers if worker.number in job.workers]
        for worker in alive:
            worker.address = Address(host="10.0.0.1", port=1000 + worker.number % 60_000)
        if alive:
            self._timeline.later(self._delays.script, partial(self._on_ready, job, alive))
            self._agents.beat(host)

    # what they do themselves

    def _on_ready(self, job: SimulatedJob, workers: list[SimulatedWorker]) -> None:
        alive = [worker for worker in workers if worker.number in job.workers]
        for worker in alive:
            worker.state = "ready"
        for worker in alive:
            self._report(job, worker.number, job.submission.ready())
        self._on_formed(job)

    def _on_formed(self, job: SimulatedJob) -> None:
        """Begin to train, or let the members switch at their next boundary, if an order can take effect."""
        order = job.newest_formed()
        if order is None:
            return
        if job.members:
            self._schedule_boundary(job)
        elif order.cold_start:
            self._switch(job, order)
            job.checkpoint_time = self._timeline.now
            self._train(job)

    def _switch(self, job: SimulatedJob, order: Allocation, *, pause: float = 0.0, leave: bool = True) -> None:
        leavers = set(job.members) - {p.worker for p in order.placements}
        job.members = tuple(p.worker for p in order.placements)
        job.trained |= set(job.members)
        job.generation = order.generation
        job.batch_size = order.batch_size or job.batch_size
        job.orders = [newer for newer in job.orders if newer.generation > order.generation]
        for number in job.members:
            job.workers[number].state = "member"
            job.workers[number].generation = order.generation
        switched = Switched(workers=job.members, iteration=job.iteration, pause_seconds=pause)
        self._report(job, job.members[0], switched)
        for number in sorted(leavers) if leave else ():
            job.workers[number].state = "left"
            self._timeline.later(self._delays.exit, partial(self.exit, job, number, "left"))

    def _train(self, job: SimulatedJob, *, pause: float = 0.0) -> None:
        """Train on, after ``pause`` seconds, unless what was reported of the switch has ended the job's membership."""
        if not job.members:
            return
        if job.missing:
            self._accuse(job, job.life)
            return
        pace = job.submission.training.pace(job.members_by_host, job.batch_size, job.done)
        stretch = job.stretch = Stretch(self._timeline.now + pause, pace, job.iteration, job.done)
        measured = stretch.end_of(1 + NUM_MEASURED) - self._timeline.now
        self._timeline.later(measured, partial(self._report_progress, job, stretch))
        self._schedule_boundary(job)

    def _report_progress(self, job: SimulatedJob, stretch: Stretch) -> None:
        """Report what was measured since ``stretch`` began, unless it has ended."""
        if stretch is not job.stretch:
            return
        pace, hosts = stretch.pace, job.members_by_host
        measurement = Measurement(
            workers=sum(hosts),
            hosts=len(hosts),
            batch_size=job.batch_size,
            iterations=NUM_MEASURED,
            compute_seconds=pace.seconds - pace.exchange_seconds,
            exchange_seconds=pace.exchange_seconds,
        )
        progress = Progress(
            iteration=job.iteration_at(self._timeline.now),
            epoch=0,
            iteration_seconds=pace.seconds,
            measurement=measurement,
            noise_scale=pace.noise_scale,
        )
        self._report(job, job.members[0], progress)

    def _schedule_boundary(self, job: SimulatedJob) -> None:
        """Simulate the next boundary at which something happens, instead of the one that was scheduled."""
        if job.stretch is None:
            return
        now, stretch, every = self._timeline.now, job.stretch, job.submission.checkpoint_seconds
        num = next_ = stretch.num_complete(now) + 1
        if not (job.is_pausing or job.newest_formed()):
            num = max(next_, stretch.num_until(stretch.pace.until))
            if every:
                num = min(num, max(next_, stretch.num_by(job.checkpoint_time + every)))
        job.boundary += 1
        self._timeline.later(stretch.end_of(num) - now, partial(self._on_boundary, job, job.boundary, num))

    def _on_boundary(self, job: SimulatedJob, boundary: int, num: int) -> None:
        if boundary != job.boundary or job.stretch is None:
            return
        job.commit(num)
        if job.done >= job.submission.training.work * (1 - RESOLUTION):
            job.stretch = None
            self._complete(job)
        elif job.is_pausing:
            job.stretch = None
            self._save_checkpoint(job, pausing=True)
        else:
            self._go_on(job, job.stretch)

    def _go_on(self, job: SimulatedJob, stretch: Stretch) -> None:
        """Train on after a boundary, as before or as is due from here on."""
        every = job.submission.checkpoint_seconds
        if every and self._timeline.now - job.checkpoint_time >= every - CLOCK_RESOLUTION:
            self._save_checkpoint(job)
        if order := job.newest_formed():
            job.stretch = None
            is_same = {placement.worker for placement in order.placements} == set(job.members)
            pause = 0.0 if is_same else self._delays.change
            self._switch(job, order, pause=pause)
            self._train(job, pause=pause)
        elif job.done >= stretch.pace.until * (1 - RESOLUTION):
            self._train(job)
        else:
            self._schedule_boundary(job)

    def _save_checkpoint(self, job: SimulatedJob, *, pausing: bool = False) -> None:
        job.checkpoint = Position(job.iteration, job.done, job.batch_size)
        job.checkpoint_time = self._timeline.now
        saved = CheckpointSaved(lineage=job.lineage, iteration=job.iteration, num_bytes=1, pausing=pausing)
        self._report(job, job.members[0], saved)

    def _complete(self, job: SimulatedJob) -> None:
        members, job.is_complete = job.members, True
        completed = Completed(
            iteration=job.iteration,
            epoch=0,
            samples_seen=0,
            loss=None,
            metrics={},
            validation={},
            params_sha256="0" * 64,
            model=None,
            ledger=(),
            bits="same bits",
        )
        self._report(job, members[0], completed)
        for number in members:
            self._timeline.later(self._delays.exit, partial(self.exit, job, number, "finished"))

    # what happens when some of them are lost

    def _on_lost(self, job: SimulatedJob, number: int) -> None:
        """Let the other members notice, when the round in flight does not end."""
        if number not in job.members or job.stretch is None:
            return
        now, stretch = self._timeline.now, job.stretch
        end = stretch.end_of(stretch.num_complete(now) + 1)
        job.stop_training(now)
        self._timeline.later(end - now, partial(self._accuse, job, job.life))

    def _recover(self, job: SimulatedJob, order: Allocation) -> None:
        """Leave the round that cannot end; train again if all workers that the order names are alive."""
        named = tuple(placement.worker for placement in order.placements)
        if job.is_complete or order.generation <= job.generation:
            return
        if set(named) & set(job.members):
            job.stop_training(self._timeline.now)
            job.life += 1
            job.orders = []
        if set(named) <= set(job.members) & job.workers.keys():
            self._switch(job, order, pause=self._delays.change, leave=False)
            self._train(job, pause=self._delays.change)
        else:
            self._accuse(job, job.life)

    def _accuse(self, job: SimulatedJob, life: int) -> None:
        """Let members that wait for one that is gone report it, again and again as long as they wait."""
        alive = [number for number in job.members if number in job.workers]
        if life != job.life or job.is_complete or not job.missing or not alive:
            return
        suspected = PeerSuspected(suspect=job.missing[0], evidence="broken link", reason="")
        for number in alive:
            if number in job.workers:
                self._report(job, number, suspected)
        self._timeline.later(ACCUSE_AGAIN_SECONDS, partial(self._accuse, job, life))

    def _report(self, job: SimulatedJob, number: int, content: Content) -> None:
        worker = job.workers[number]
        report = Report(
            job=job.id,
            host=worker.host,
            incarnation=self._agents.hosts[worker.host].incarnation,
            worker=number,
            slot=worker.slot,
            generation=job.generation,
            time=at(self._timeline.now),
            content=content,
        )
        self._send(report)
