"""A simulated job: how long it takes, and how far its workers have come."""

from dataclasses import dataclass, field

from resile_shared.messages.allocations import Allocation
from resile_shared.messages.hosts import Address, WorkerReport
from resile_shared.messages.jobs import JobSpec
from resile_shared.messages.reports import Ready


@dataclass(frozen=True)
class Submission:
    """A job that comes at ``time`` and trains ``iterations``, with a checkpoint after each ``checkpoint_every``."""

    time: float
    job: str
    spec: JobSpec
    iterations: int
    num_shards: int = 24
    shard_seconds: float = 0.01
    checkpoint_every: int | None = None

    def ready(self) -> Ready:
        """Return what its workers say at their training call."""
        return Ready(
            iterations_total=self.iterations,
            num_shards=self.num_shards,
            batch_size=self.num_shards * 8,
            epochs=1,
            samples=self.num_shards * 8 * self.iterations,
            bits="same bits",
        )


@dataclass
class SimulatedWorker:
    """One worker, as its agent sees it."""

    host: str
    slot: int
    state: str = "starting"
    address: Address | None = None
    generation: int = 0


@dataclass
class Training:
    """A job as its workers see it."""

    submission: Submission
    workers: dict[int, SimulatedWorker] = field(default_factory=dict)
    members: tuple[int, ...] = ()
    generation: int = 0
    allocation: Allocation | None = None
    orders: list[Allocation] = field(default_factory=list)
    gone: dict[int, tuple[str, WorkerReport, float]] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
    trained: set[int] = field(default_factory=set)  # who ever had the state
    iteration: int = 0
    checkpoint: int = 0
    life: int = 0  # iterations of an earlier life that are still under way have no effect
    shall_pause: bool = False
    is_complete: bool = False

    @property
    def missing(self) -> list[int]:
        """Members whose processes are gone: the round that is under way is never finished."""
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
