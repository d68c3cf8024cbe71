"""What happens to a simulated pool: jobs that are submitted, requests of users, hosts that come and go."""

from collections.abc import Sequence
from dataclasses import dataclass

from resile_shared.errors import UsageError
from resile_shared.messages.commands import JobPause, JobPriority, JobResume, JobStop, TenantDelete, TenantSet
from resile_shared.messages.hosts import HostState, Labels
from resile_shared.messages.jobs import JobSpec
from resile_shared.messages.message import MAX_INTEGER
from resile_shared.messages.reports import Ready

from .training import Training

CHECKPOINT_SECONDS = 600.0


@dataclass(frozen=True)
class Submission:
    """A job that is submitted ``time`` seconds after the start, and should be complete by ``deadline``, if it has one.

    While it trains, a checkpoint is saved after each ``checkpoint_seconds``; None: never.
    """

    time: float
    job: str
    spec: JobSpec
    training: Training
    checkpoint_seconds: float | None = None
    bits: str = "same bits"
    deadline: float | None = None

    def ready(self) -> Ready:
        """Return what its workers report at their training call."""
        training = self.training
        return Ready(
            iterations_total=training.iterations_total,
            num_shards=training.num_shards,
            batch_size=training.batch_size,
            epochs=1,
            samples=min(training.batch_size * training.iterations_total, MAX_INTEGER),
            bits=self.bits,
            batch_range=training.batch_range,
            micro_batch_size=training.micro_batch_size,
        )


@dataclass(frozen=True)
class UserRequest:
    """What a user wants of a job, or an operator of a tenant, ``time`` seconds after the start."""

    time: float
    request: JobPriority | JobStop | JobPause | JobResume | TenantSet | TenantDelete


@dataclass(frozen=True)
class HostChange:
    """A host enters ``state``, ``time`` seconds after the start. It comes, or comes back, with ``num_slots``."""

    time: float
    host: str
    state: HostState
    num_slots: int = 0
    labels: Labels | None = None


@dataclass(frozen=True)
class Workload:
    """All that happens from outside, each kind in the order of time. Without ``hosts`` it fits any pool."""

    submissions: tuple[Submission, ...]
    requests: tuple[UserRequest, ...] = ()
    hosts: tuple[HostChange, ...] = ()
    start_seconds: float | None = None
    """How long a start takes until the first iteration, if that was recorded."""
    left_out: tuple[str, ...] = ()
    """Recorded jobs about which too little is known to simulate them."""


def equal_hosts(num_slots: int, num_hosts: int) -> tuple[HostChange, ...]:
    """Return hosts that are there from the start, with the same number of slots, or one more or less.

    Raises:
        UsageError: there are fewer slots than hosts.

    """
    if num_slots < num_hosts:
        raise UsageError(f"{num_slots} slots on {num_hosts} hosts: every host needs at least one slot")
    fewest, more = divmod(num_slots, num_hosts)
    sizes: Sequence[int] = [fewest + (number < more) for number in range(num_hosts)]
    return tuple(HostChange(0.0, f"host-{number}", HostState.UP, size) for number, size in enumerate(sizes, 1))
