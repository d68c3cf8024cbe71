"""What a worker's membership looks like at one moment: immutable, so that any thread may read it."""

from dataclasses import dataclass

from ..messages import Order
from .roles import Role


@dataclass(frozen=True)
class MembershipView:
    """The membership of ``worker`` after the last event."""

    worker: int
    role: Role = Role.NEW
    current: Order | None = None
    """The order of the generation that this worker is a member of, or was until it left."""
    first_order: Order | None = None
    """Before this worker is a member: the oldest known order that names it."""
    recovery_order: Order | None = None
    """The newest recovery order, as long as its generation is not active."""
    newest: int = 0
    """The newest generation whose order this worker has; 0: it has none."""
    can_sync_state: bool = False
    """Whether all members of ``recovery_order`` are linked, and their rounds are known."""
    is_recovery_linked: bool = False
    """Whether all members of ``recovery_order`` are linked."""
    formed: tuple[Order, ...] = ()
    """The orders of the newer generations that this worker has formed."""
    ready_for: tuple[Order, ...] = ()
    """Before this worker is a member: the orders of the generations that it is ready for."""
    is_pause_requested: bool = False

    @property
    def connected(self) -> dict[int, tuple[int, ...]]:
        """The workers of each generation that this one is or may become a member of, linked to all; by generation."""
        recovery = (self.recovery_order,) if self.recovery_order and self.is_recovery_linked else ()
        current = (self.current,) if self.current else ()
        orders = (*current, *self.formed, *self.ready_for, *recovery)
        return {order.generation: order.workers for order in orders if self.worker in order.workers}

    @property
    def must_recover(self) -> bool:
        """Whether a recovery order names this worker and is not active yet."""
        return self.recovery_order is not None and self.worker in self.recovery_order.workers

    @property
    def is_released(self) -> bool:
        """Whether this leaver may exit, whatever it waits for: the others have gone further without it."""
        return self.role is Role.RELEASED

    def is_superseded(self, generation: int) -> bool:
        """Whether there is a recovery order newer than ``generation``."""
        return self.recovery_order is not None and self.recovery_order.generation > generation

    def named(self, next_iteration: int) -> int:
        """The generation that the header of the round before ``next_iteration`` names.

        It is the newest one formed that may train that iteration already.
        """
        assert self.current is not None
        able = (order.generation for order in self.formed if order.not_before <= next_iteration)
        return max(able, default=self.current.generation)

    def is_member_of(self, generation: int) -> bool:
        """Whether this worker is a member of ``generation``, the current one or one that is formed."""
        assert self.current is not None
        order = next((order for order in self.formed if order.generation == generation), self.current)
        return self.worker in order.workers

    def must_wait(self, next_iteration: int) -> bool:
        """Whether the round before ``next_iteration`` has to wait until a newer generation is formed."""
        assert self.current is not None
        until = self.current.until
        return (
            until is not None
            and next_iteration >= until
            and self.recovery_order is None
            and self.named(next_iteration) == self.current.generation
        )
