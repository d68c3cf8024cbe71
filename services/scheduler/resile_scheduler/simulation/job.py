"""A simulated job and its workers: how far they have come."""

from dataclasses import dataclass, field

from resile_shared.messages.allocations import Allocation
from resile_shared.messages.hosts import Address, WorkerReport

from .workload import Submission


@dataclass
class SimulatedWorker:
    """One worker, as its agent sees it."""

    host: str
    slot: int
    state: str = "starting"
    address: Address | None = None
    generation: int = 0


@dataclass
class SimulatedJob:
    """A job as its workers see it."""

    submission: Submission
    workers: dict[int, SimulatedWorker] = field(default_factory=dict)
    members: tuple[int, ...] = ()
    generation: int = 0
    lineage: int = 0
    allocation: Allocation | None = None
    orders: list[Allocation] = field(default_factory=list)
    gone: dict[int, tuple[str, WorkerReport, float]] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
    trained: set[int] = field(default_factory=set)  # all that ever were members
    iteration: int = 0
    checkpoint: int = 0
    life: int = 0  # iterations of an earlier life that are in flight have no effect
    is_pausing: bool = False
    is_complete: bool = False

    @property
    def missing(self) -> list[int]:
        """Members whose processes are gone: the round in flight never ends."""
        return [number for number in self.members if number not in self.workers]

    def newest_formed(self) -> Allocation | None:
        """Return the newest order whose joiners are all at their training call."""
        for order in reversed(self.orders):
            joiners = [p.worker for p in order.placements if p.worker not in self.members]
            if order.generation > self.generation and all(
                number in self.workers and self.workers[number].state == "ready" for number in joiners
            ):
                return order
        return None
