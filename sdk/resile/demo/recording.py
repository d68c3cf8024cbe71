"""What was seen of the jobs while the story was told."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from resile_shared.http.api import HostView, JobSummary, JobView
from resile_shared.messages.hosts import HostState


@dataclass(frozen=True)
class Point:
    """A job was seen to have committed ``iteration`` iterations, ``seconds`` after the story began."""

    seconds: float
    iteration: int
    loss: float | None


@dataclass(frozen=True)
class Stretch:
    """``workers`` trained iterations ``first`` to ``last`` - 1; times are in seconds since the story began."""

    begin: float
    end: float
    first: int
    last: int
    workers: int


@dataclass(frozen=True)
class Step:
    """What the story did, ``seconds`` after it began."""

    seconds: float
    text: str


@dataclass
class Recording:
    """Progress of jobs by their ids. ``began`` is when the story did, in seconds since the epoch."""

    began: float
    points: dict[str, list[Point]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    slots: list[tuple[float, int]] = field(default_factory=list)
    """The number of slots of the living hosts over time: each with the second from which it holds."""
    killed: set[tuple[str, int]] = field(default_factory=set)
    """Hosts that were killed, with their incarnations."""

    def note(self, text: str, *, now: float) -> None:
        """Record a step of the story."""
        self.steps.append(Step(now - self.began, text))

    def add(self, jobs: Iterable[JobSummary], *, now: float) -> None:
        """Record the progress of jobs that a poll of the pool has shown."""
        for job in jobs:
            points = self.points.setdefault(job.id, [])
            if not points or job.iteration > points[-1].iteration:
                points.append(Point(now - self.began, job.iteration, job.loss))

    def add_hosts(self, hosts: Iterable[HostView], *, now: float) -> None:
        """Record which hosts are up, without those that were killed but that the pool has not yet declared lost."""
        up = [host for host in hosts if host.state is HostState.UP and (host.id, host.incarnation) not in self.killed]
        num_slots = sum(len(host.slots) for host in up)
        if not self.slots or self.slots[-1][1] != num_slots:
            self.slots.append((now - self.began, num_slots))

    def stretches(self, job: JobView) -> list[Stretch]:
        """Return the parts of a job's life between two changes of its membership, by its history."""
        changes = [item for item in job.history if item.kind == "allocation" or item.kind == job.state.value]
        return [
            Stretch(
                begin=begun.time.timestamp() - self.began,
                end=ended.time.timestamp() - self.began,
                first=begun.iteration,
                last=ended.iteration,
                workers=begun.workers,
            )
            for begun, ended in pairwise(changes)
        ]
