"""Simulates a workload under one policy: the scheduler's core from the first submission to the end of the last job.

A simulation is deterministic: the same workload and settings have the same outcome.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf
from random import Random

from resile_shared.errors import UsageError
from resile_shared.messages.commands import PoolPolicy, TenantDelete, TenantSet
from resile_shared.messages.hosts import HostState
from resile_shared.messages.message import at
from resile_shared.policies import PolicyName

from ..core.events import JobChangeRequested, StateRestored, TenantChangeRequested, Tick
from ..core.retention import Limits
from ..policies.table import POLICIES
from .outcome import Outcome, Recorder
from .simulated_pool import SimulatedPool
from .workers import Delays
from .workload import HostChange, Submission, UserRequest, Workload

START = 1_000_000.0
TICK_SECONDS = 30.0
NUM_FINE_TICKS = 60
"""For this many seconds after the loss of a host, the core checks its deadlines each second, as it does live."""
KEEP_DAYS = 36500.0
STUCK_SECONDS = 3600.0
"""If no job holds a slot for this long, and nothing happens from outside any more, none ever will."""
EVENTS_PER_REPORT = 1000
LIKE_LIVE = Delays(change=0.5)
"""How long starts and changes take on a real pool: `bench/rescale.py`."""


@dataclass(frozen=True)
class Failures:
    """Hosts crash at random, each after ``mean_hours`` on average, and are back after ``repair_minutes``."""

    mean_hours: float
    repair_minutes: float = 10.0


@dataclass(frozen=True)
class Settings:
    """What is simulated; ``seed`` decides when hosts fail."""

    policy: PolicyName
    preemption: bool = True
    delays: Delays = LIKE_LIVE
    failures: Failures | None = None
    seed: int = 0

    @property
    def name(self) -> str:
        """The policy, in words."""
        return f"{self.policy}{'' if self.preemption else ', no preemption'}"


def delays_of(workload: Workload, change_seconds: float | None) -> Delays:
    """Return how long starts and changes take: as recorded, else as on a real pool; ``change_seconds`` overrides both.

    The times of iterations that were recorded include what changes cost.
    """
    delays = LIKE_LIVE
    if workload.start_seconds is not None:
        delays = replace(delays, script=max(workload.start_seconds - delays.fork, 0.0), change=0.0)
    return delays if change_seconds is None else replace(delays, change=change_seconds)


OnProgress = Callable[[int, float], object]
"""Called now and then with the number of jobs that have ended, and the simulated seconds."""


def simulate(
    workload: Workload, settings: Settings, *, on_progress: OnProgress = lambda num_ended, seconds: None
) -> Outcome:
    """Return what becomes of the jobs of a workload. It ends when all have ended, or none that is left can ever run.

    Raises:
        UsageError: the workload has no host or no job.

    """
    if not workload.hosts or not workload.submissions:
        raise UsageError("nothing to simulate: the workload needs at least one job and one host")
    return _Simulation(workload, settings).run(on_progress)


class _Simulation:
    def __init__(self, workload: Workload, settings: Settings) -> None:
        self._workload = workload
        self._settings = settings
        self._random = Random(settings.seed)
        self._recorder = Recorder(workload)
        pool = self._pool = SimulatedPool(
            policies=POLICIES,
            chosen=PoolPolicy(policy=settings.policy, preemption=settings.preemption),
            start=START,
            limits=Limits(0, KEEP_DAYS),
            delays=settings.delays,
        )
        pool.on_stored = lambda stored: self._recorder.on_stored(stored, time=self._seconds)
        self._last_outside = max(
            event.time for events in (workload.submissions, workload.requests, workload.hosts) for event in events
        )
        self._busy_until = 0.0
        self._is_stuck = False
        self._num_requests = 0

    @property
    def _seconds(self) -> float:
        return self._pool.now - START

    def run(self, on_progress: OnProgress) -> Outcome:
        pool, recorder = self._pool, self._recorder
        pool.handle(StateRestored())
        for change in self._workload.hosts:
            early = self._settings.delays.detection if change.state is HostState.LOST else 0.0
            pool.later(change.time - early, partial(self._change_host, change))
        for request in self._workload.requests:
            pool.later(request.time, partial(self._request, request))
        pool.submit(map(_with_deadline, self._workload.submissions))
        pool.later(0.0, self._tick)
        num_events = 0
        while recorder.num_ended < len(self._workload.submissions) and not self._is_stuck:
            pool.step()
            num_events += 1
            if num_events % EVENTS_PER_REPORT == 0:
                on_progress(recorder.num_ended, self._seconds)
        return recorder.outcome(self._settings.name, end=self._seconds)

    def _tick(self) -> None:
        self._pool.handle(Tick())
        if self._pool.scheduler.holders() or self._seconds < self._last_outside:
            self._busy_until = self._seconds
        self._is_stuck = self._seconds - self._busy_until > STUCK_SECONDS
        self._pool.later(self._seconds_to_tick, self._tick)

    @property
    def _seconds_to_tick(self) -> float:
        """Seconds until the next tick; while there is no job, the ticks before the next event are left out."""
        idle = self._pool.next_time - self._pool.now
        if self._pool.records or idle == inf:
            return TICK_SECONDS
        return TICK_SECONDS * max(1.0, ceil(idle / TICK_SECONDS))

    def _request(self, request: UserRequest) -> None:
        self._num_requests += 1
        command = f"request {self._num_requests}"
        if isinstance(request.request, TenantSet | TenantDelete):
            self._pool.handle(TenantChangeRequested(command, request.request))
        else:
            self._pool.handle(JobChangeRequested(command, request.request))

    # hosts

    def _change_host(self, change: HostChange) -> None:
        known = self._pool.hosts.get(change.host)
        if change.state is HostState.UP and known is not None and known.state is HostState.DRAINING:
            self._pool.change_host(change.host, change.state)  # it was undrained
        elif change.state is HostState.UP:
            self._add_host(change)
        elif known is not None and known.state in (HostState.UP, HostState.DRAINING):
            if change.state is HostState.LOST:
                self._crash(change.host)
            else:
                self._pool.change_host(change.host, change.state)
        self._record_capacity()

    def _add_host(self, change: HostChange) -> None:
        known = self._pool.hosts.get(change.host)
        incarnation = known.incarnation + 1 if known else 1
        self._pool.add_host(change.host, change.num_slots, incarnation=incarnation, labels=change.labels)
        if self._settings.failures:
            seconds = self._random.expovariate(1.0 / (self._settings.failures.mean_hours * 3600.0))
            self._pool.later(seconds, partial(self._fail, change, incarnation))

    def _fail(self, change: HostChange, incarnation: int) -> None:
        """Crash a host for a while, unless it has another incarnation by now, or is gone."""
        host = self._pool.hosts[change.host]
        if host.state is not HostState.UP or host.incarnation != incarnation:
            return
        assert self._settings.failures is not None
        self._crash(change.host)
        self._record_capacity(without=change.host)
        self._pool.later(self._settings.failures.repair_minutes * 60.0, partial(self._change_host, change))

    def _crash(self, host: str) -> None:
        self._pool.crash(host)
        for seconds in range(NUM_FINE_TICKS):
            self._pool.later(self._settings.delays.detection + seconds, partial(self._pool.handle, Tick()))

    def _record_capacity(self, *, without: str = "") -> None:
        alive = (HostState.UP, HostState.DRAINING)
        hosts = [host for name, host in self._pool.hosts.items() if host.state in alive and name != without]
        self._recorder.on_capacity(sum(len(host.slots) for host in hosts), time=self._seconds)


def _with_deadline(submission: Submission) -> Submission:
    """Return what is submitted with the deadline as the scheduler sees it, a time."""
    if submission.deadline is None:
        return submission
    deadline = at(START + submission.deadline)
    return replace(submission, spec=submission.spec.model_copy(update={"deadline": deadline}))
