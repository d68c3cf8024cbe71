"""One worker, from the allocation that names it until its slot is free."""

import signal
from dataclasses import dataclass
from enum import IntEnum

from resile_shared.messages.hosts import Address, WorkerExit

from .slot_sets import SlotId

SCRIPT_ERRORS = ("failed", "exited")
LOST = ("abandoned", "orphaned")


class Phase(IntEnum):
    """How far a worker has come; it never goes back, so reports may come late, twice and in any order."""

    STARTING = 0
    READY = 1
    MEMBER = 2
    LEFT = 3
    GONE = 4


@dataclass
class Worker:
    """A worker that holds its slot. Only its own methods change it."""

    number: int
    slot: SlotId
    incarnation: int
    named_at: float
    phase: Phase = Phase.STARTING
    address: Address | None = None
    was_seen: bool = False
    """Whether a heartbeat listed it, perhaps to an earlier scheduler: its address came in one."""
    failure: str = ""
    """The kind of its failure, if it failed."""
    status: int = 0
    """Its exit status, or minus the signal that killed it."""
    reason: str = ""
    """Its failure, in words."""
    failed_at: float = 0.0
    """When its failure became known, in seconds since the epoch."""
    is_lost: bool = False
    """Whether it failed as a member."""
    is_host_lost: bool = False
    """Whether it failed because its host was lost, or does not answer."""
    is_fenced: bool = False
    """Whether its job goes on, or has completed, without it."""
    has_finished: bool = False
    stop_sent: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether it cannot go on."""
        return bool(self.failure)

    @property
    def may_be_at_fault(self) -> bool:
        """Whether its script may have caused its end: a lost host and a kill from outside did not."""
        is_from_outside = self.failure == "killed" and self.status == -signal.SIGKILL
        return self.has_failed and self.failure not in LOST and not is_from_outside

    @property
    def has_own_fault(self) -> bool:
        """Whether its script caused its end."""
        return self.failure in (*SCRIPT_ERRORS, "out of memory")

    @property
    def is_sound(self) -> bool:
        """Whether it has the state of its job, and can go on with it."""
        can_go_on = not (self.has_failed or self.is_fenced)
        return self.phase is Phase.MEMBER and can_go_on and self.address is not None

    def advance(self, phase: Phase) -> None:
        """Move on to ``phase``, unless it is further already."""
        self.phase = max(self.phase, phase)

    def see(self, address: Address | None) -> bool:
        """Record that a heartbeat listed it; return whether its address is new."""
        self.was_seen = True
        if address is None or self.address is not None:
            return False
        self.address = address
        return True

    def end(self, how: WorkerExit) -> None:
        """Record that its process is gone."""
        self.phase = Phase.GONE
        self.has_finished = how.kind == "finished"

    def fail(self, how: WorkerExit, *, now: float) -> None:
        """Record why it cannot go on."""
        self.failure, self.status, self.failed_at = how.kind, how.status, now
        self.reason = how.describe(f"worker {self.number} on {self.slot.name}")

    def lose(self) -> None:
        """Record that the job lost it as a member."""
        self.is_lost = True

    def lose_host(self) -> None:
        """Record that its host is lost: unless it has failed already, this is why it fails."""
        self.is_host_lost = not self.has_failed

    def evict(self, reason: str) -> None:
        """Record that the job goes on without it, though its process may be alive."""
        if not self.has_failed:
            self.failure, self.reason, self.is_lost = "abandoned", reason, True

    def fence(self) -> None:
        """Record that no generation may name it again."""
        self.is_fenced = True

    def mark_stop_sent(self) -> None:
        """Record that its agent was told to stop it."""
        self.stop_sent = True
