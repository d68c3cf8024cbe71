"""How long the scheduler's core takes to handle one event, in a pool that trains many jobs.

    python bench/decisions.py [--quick | --tiny] [--policy fairshare] [--profile NAME]

A new scheduler takes a pool over in which all slots are held, and hears from all hosts. Then one thing happens after
another, and agents answer as they do live: they start, stop and report workers until nothing is left to do. Each event
is one call of `Scheduler.handle`. Times are processor time: all of it is one thread. Writes are the records and
allocations that are stored until the pool has settled.
"""

import cProfile
import pstats
import statistics
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from report import Target, argument_parser, conclude, print_table

from resile_scheduler.core.core import Scheduler
from resile_scheduler.core.events import (
    AssignJobs,
    Command,
    Event,
    JobChangeRequested,
    JobSubmitted,
    StateRestored,
    StopWorkers,
    StoreJob,
    Tick,
    WriteAllocation,
)
from resile_scheduler.policies.demand import Policy
from resile_scheduler.policies.table import POLICIES
from resile_shared.messages.allocations import Allocation, Placement
from resile_shared.messages.commands import JobPriority, JobStop
from resile_shared.messages.hosts import Address, Heartbeat, HostRecord, HostState, Slot, WorkerExit, WorkerReport
from resile_shared.messages.jobs import DEFAULT_PRIORITY, JobRecord, JobSpec, JobState
from resile_shared.messages.message import at
from resile_shared.messages.reports import Content, Progress, Ready, Report, Switched
from resile_shared.policies import PolicyName
from resile_shared.version import VERSION

SLOTS_PER_HOST = 8
MOST = 64
"""The slots that one job can use."""
ADDRESS = Address(host="10.0.0.1", port=1)
NOW = 1_000_000.0
READY = Ready(
    iterations_total=10_000, num_shards=MOST, batch_size=8 * MOST, epochs=1, samples=80_000 * MOST, bits="same bits"
)


def record(number: int, workers: int) -> JobRecord:
    """Return a job that trains."""
    return JobRecord(
        job=f"job-{number}",
        spec=spec(),
        state=JobState.RUNNING,
        priority=DEFAULT_PRIORITY,
        submitted=at(NOW + number),
        generation=1,
        lineage=1,
        next_worker=workers,
        applied_commands=(f"submit {number}",),
        ready=READY,
        holding_since=at(NOW),
        device_class="cpu",
    )


def spec() -> JobSpec:
    return JobSpec(name="train", package="packages/1", script="train.py", max_workers=MOST)


def host(number: int, state: HostState = HostState.UP) -> HostRecord:
    return HostRecord(
        host=f"host-{number}",
        incarnation=1,
        state=state,
        address="10.0.0.1",
        slots=tuple(Slot(index=index) for index in range(SLOTS_PER_HOST)),
        device_class="cpu",
        version=VERSION,
        since=at(NOW),
    )


def trained(num_jobs: int, num_slots: int) -> tuple[list[JobRecord], list[Allocation]]:
    """Return jobs that hold all slots, in equal shares to the slot, and what they are allocated."""
    share, more = divmod(num_slots, num_jobs)
    records, allocations, slot = [], [], 0
    for number in range(1, num_jobs + 1):
        workers = share + (number <= more)
        placements = tuple(
            Placement(
                worker=worker,
                host=f"host-{1 + (slot + worker) // SLOTS_PER_HOST}",
                incarnation=1,
                slot=(slot + worker) % SLOTS_PER_HOST,
                address=ADDRESS,
            )
            for worker in range(workers)
        )
        slot += workers
        records.append(record(number, workers))
        allocations.append(
            Allocation(job=f"job-{number}", epoch=1, generation=1, placements=placements, secret="", cold_start=True)
        )
    return records, allocations


@dataclass
class Agents:
    """All agents of the pool: they do at once what the scheduler says, and report it."""

    workers: dict[str, dict[tuple[str, int], WorkerReport]] = field(default_factory=lambda: defaultdict(dict))
    """By host, then by job and number."""
    members: dict[str, tuple[Placement, ...]] = field(default_factory=dict)
    assigned: dict[str, tuple[str, ...]] = field(default_factory=dict)
    incarnations: Counter[str] = field(default_factory=Counter)
    """By host, less one."""
    num_beats: int = 0

    def restore(self, allocation: Allocation) -> None:
        """Train what an earlier scheduler allocated."""
        self.members[allocation.job] = allocation.placements
        for placement in allocation.placements:
            self._start(allocation, placement, "member", generation=allocation.generation)

    def _start(self, allocation: Allocation, placement: Placement, state: str, *, generation: int = 0) -> None:
        worker = {"job": allocation.job, "worker": placement.worker, "slot": placement.slot, "state": state}
        self.workers[placement.host][allocation.job, placement.worker] = WorkerReport.model_validate(
            {**worker, "address": ADDRESS, "generation": generation}
        )

    def beat(self, name: str, gone: Iterable[WorkerReport] = ()) -> Heartbeat:
        """Return the next heartbeat of a host."""
        self.num_beats += 1
        return Heartbeat(
            host=name,
            incarnation=1 + self.incarnations[name],
            number=self.num_beats,
            jobs=self.assigned.get(name),
            workers=(*self.workers[name].values(), *gone),
        )

    def answer(self, command: Command) -> Iterator[Event]:
        """Yield what they report of ``command``."""
        match command:
            case WriteAllocation(allocation):
                yield from self._start_missing(allocation)
                if allocation.placements and allocation.has_addresses:
                    yield from self._switch(allocation)
            case AssignJobs(name, _, jobs):
                self.assigned[name] = jobs
            case StopWorkers(job, name, _, numbers):
                yield from self._end(name, [(job, number) for number in numbers], "exited")

    def _start_missing(self, allocation: Allocation) -> Iterator[Event]:
        hosts: dict[str, list[Placement]] = defaultdict(list)
        for placement in allocation.placements:
            if (allocation.job, placement.worker) not in self.workers[placement.host]:
                self._start(allocation, placement, "starting")
                hosts[placement.host].append(placement)
        for name, placements in hosts.items():
            yield self.beat(name)
            for placement in placements:
                yield report(allocation, placement, READY)

    def _switch(self, order: Allocation) -> Iterator[Event]:
        named = {placement.worker for placement in order.placements}
        leavers = [p for p in self.members.get(order.job, ()) if p.worker not in named]
        self.members[order.job] = order.placements
        for placement in order.placements:
            self._start(order, placement, "member", generation=order.generation)
        yield report(order, order.placements[0], Switched(workers=tuple(named), iteration=100 * order.generation))
        for placement in leavers:
            yield from self._end(placement.host, [(order.job, placement.worker)], "left")

    def _end(self, name: str, workers: Iterable[tuple[str, int]], kind: str) -> Iterator[Event]:
        known = [worker for key in workers if (worker := self.workers[name].pop(key, None))]
        exit_ = WorkerExit.model_validate({"kind": kind})
        if known:
            yield self.beat(name, [w.model_copy(update={"state": "gone", "exit": exit_}) for w in known])


def report(allocation: Allocation, by: Placement, content: Content) -> Report:
    return Report(
        job=allocation.job,
        host=by.host,
        incarnation=by.incarnation,
        worker=by.worker,
        slot=by.slot,
        generation=allocation.generation,
        time=at(NOW),
        content=content,
    )


@dataclass(frozen=True)
class Handled:
    """One event, how long it took, and what was to be stored."""

    kind: str
    milliseconds: float
    writes: int


class BenchPool:
    """A scheduler and its agents. ``handled`` has all events since it was cleared."""

    def __init__(self, num_jobs: int, num_slots: int, policy: Policy) -> None:
        self.agents = Agents()
        self.handled: list[Handled] = []
        self.now = NOW + num_jobs
        self.profiler: cProfile.Profile | None = None
        self.hosts = [host(number) for number in range(1, 1 + num_slots // SLOTS_PER_HOST)]
        self._scheduler = Scheduler(policy=policy)
        records, allocations = trained(num_jobs, num_slots)
        for allocation in allocations:
            self.agents.restore(allocation)
        self.happen(StateRestored(tuple(records), tuple(allocations), tuple(self.hosts), num_jobs))
        for known in self.hosts:
            self.happen(self.agents.beat(known.host))

    def happen(self, event: Event) -> None:
        """Handle ``event`` and all that follows from it."""
        waiting = deque([event])
        while waiting:
            for command in self._handle(waiting.popleft()):
                waiting.extend(self.agents.answer(command))

    def lose(self, lost: HostRecord) -> None:
        """Lose a host with its workers."""
        self.agents.workers.pop(lost.host, None)
        self.agents.incarnations[lost.host] += 1
        self.happen(lost.model_copy(update={"state": HostState.LOST}))

    def join(self, lost: HostRecord) -> None:
        """Let a host come back that was lost."""
        self.happen(lost.model_copy(update={"incarnation": 1 + self.agents.incarnations[lost.host]}))
        self.happen(self.agents.beat(lost.host))

    def repeat(self, name: str) -> None:
        """Hear what is known from a host and a worker, and let time pass."""
        self.happen(self.agents.beat(name))
        job, _ = next(iter(self.agents.workers[name]))
        placements = self.agents.members[job]
        order = Allocation(job=job, epoch=1, generation=1, placements=placements, secret="")
        self.happen(report(order, placements[0], Progress(iteration=100, epoch=0)))
        self.happen(Tick())

    def _handle(self, event: Event) -> list[Command]:
        self.now += 0.001
        begun = time.process_time()
        if self.profiler:
            self.profiler.enable()
        commands = self._scheduler.handle(event, now=self.now)
        if self.profiler:
            self.profiler.disable()
        milliseconds = 1e3 * (time.process_time() - begun)
        writes = sum(isinstance(command, StoreJob | WriteAllocation) for command in commands)
        self.handled.append(Handled(_kind(event), milliseconds, writes))
        return commands


def _kind(event: Event) -> str:
    if isinstance(event, Report):
        return f"report: {event.content.kind}"
    if isinstance(event, Heartbeat):
        return "heartbeat: a worker is gone" if any(w.exit for w in event.workers) else "heartbeat"
    return {
        JobChangeRequested: "request",
        JobSubmitted: "submission",
        HostRecord: "host record",
        Tick: "tick",
    }.get(type(event), type(event).__name__)


def happenings(pool: BenchPool, turns: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield what happens, one thing after the other, each ``turns`` times."""
    job = f"job-{len(pool.agents.members) // 2}"
    for turn in range(turns):
        new = f"job-{10**6 + turn}"
        raised = JobPriority(job_id=job, priority=DEFAULT_PRIORITY * (2 - turn % 2))
        lost = pool.hosts[-1 - turn]
        yield "a priority changes", partial(pool.happen, JobChangeRequested(f"priority {turn}", raised))
        yield "a job is submitted", partial(pool.happen, JobSubmitted(f"submit {new}", spec(), new))
        yield "a job is stopped", partial(pool.happen, JobChangeRequested(f"stop {new}", JobStop(job_id=new)))
        yield "a host is lost", partial(pool.lose, lost)
        yield "a host joins", partial(pool.join, lost)
        yield "nothing new", partial(pool.repeat, pool.hosts[turn].host)


HAPPENINGS = (
    "a priority changes",
    "a job is submitted",
    "a job is stopped",
    "a host is lost",
    "a host joins",
    "nothing new",
)


@dataclass(frozen=True)
class Measured:
    """All that was handled because of one kind of happening, over some turns."""

    happening: str
    turns: tuple[tuple[Handled, ...], ...]

    def first_ms(self) -> float:
        """Return the median time of the event itself, without those that followed."""
        return statistics.median(turn[0].milliseconds for turn in self.turns)

    def slowest(self) -> Handled:
        """Return the slowest kind of event, by its median."""
        by_kind = defaultdict(list)
        for handled in (one for turn in self.turns for one in turn):
            by_kind[handled.kind].append(handled)
        medians = (sorted(same, key=lambda h: h.milliseconds)[len(same) // 2] for same in by_kind.values())
        return max(medians, key=lambda h: h.milliseconds)

    def row(self) -> tuple[str, ...]:
        """Return the cells of the table."""
        events = statistics.mean(len(turn) for turn in self.turns)
        writes = statistics.mean(sum(handled.writes for handled in turn) for turn in self.turns)
        total = statistics.median(sum(handled.milliseconds for handled in turn) for turn in self.turns)
        slowest = self.slowest()
        return (
            self.happening,
            f"{self.first_ms():.2f}",
            f"{slowest.milliseconds:.2f} ({slowest.kind})",
            f"{events:.0f}",
            f"{total:.0f}",
            f"{writes:.0f}",
        )


def measure(pool: BenchPool, turns: int, profiled: str) -> list[Measured]:
    """Let everything happen; print the profile of what is ``profiled``."""
    found: dict[str, list[tuple[Handled, ...]]] = {name: [] for name in HAPPENINGS}
    profiler = cProfile.Profile()
    for name, happen in happenings(pool, turns):
        pool.handled.clear()
        pool.profiler = profiler if name == profiled else None
        happen()
        found[name].append(tuple(pool.handled))
    if profiled:
        pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(40)
    return [Measured(name, tuple(turns_)) for name, turns_ in found.items()]


HEADER = ("", "event ms", "slowest event, by kind ms", "events", "all events ms", "writes")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--policy", type=PolicyName, default=PolicyName.FAIRSHARE, choices=list(PolicyName))
    parser.add_argument("--profile", choices=HAPPENINGS, default="", help="print where the time goes at 1,000 jobs")
    options = parser.parse_args()
    middle, large = options.length.pick(
        full=((1000, 4096), (10_000, 100_000)), quick=((1000, 4096), None), tiny=((10, 40), None)
    )
    turns = options.length.pick(full=7, quick=3, tiny=2)
    targets = []
    for size in filter(None, (middle, large)):
        pool = BenchPool(*size, POLICIES[options.policy])
        starting = f"{sum(handled.milliseconds for handled in pool.handled) / 1e3:.1f} s to take the pool over"
        found = measure(pool, turns, options.profile if size is middle else "")
        title = f"{size[0]:,} jobs on {size[1]:,} slots, {options.policy.value}: processor time of the core; {starting}"
        print_table(title, HEADER, [measured.row() for measured in found])
        if size is middle:
            slowest = max((measured.slowest() for measured in found), key=lambda handled: handled.milliseconds)
            targets.append(Target(f"the slowest kind of event ({slowest.kind})", slowest.milliseconds, 10.0, "ms"))
    conclude(targets, options.length)


if __name__ == "__main__":
    main()
