"""The generations of one job: the newest membership, those that were ordered, and the active one, which trains."""

from collections.abc import Sequence

from resile_shared.messages.allocations import Allocation, Placement
from resile_shared.messages.jobs import JobRecord

REPORT_SECONDS = 2.0


class JobGenerations:
    """The generations of one job. Everyone may read them; only these methods change them."""

    def __init__(self, *, active_number: int = 0) -> None:
        self.newest: Allocation | None = None
        self.orders: dict[int, Allocation] = {}
        """Generations that were ordered and are active or may still become so."""
        self.active: tuple[Placement, ...] = ()
        self.active_number = active_number
        self.active_since = 0
        """The first iteration of the active generation."""
        self.active_until: int | None = None
        """The iteration at which the members of the active generation wait for the next one."""
        self.batch_size: int | None = None
        """The global batch that a generation was last given; None: none was given."""
        self.is_batch_known = True
        """Whether the batch is known: not after a recovery, which continues with the batch of the abandoned round."""
        self.unreconciled_slots: frozenset[str] = frozenset()
        """Slots that the record gives an earlier scheduler's active generation, while its workers are not known."""
        self.gone_since: float | None = None
        """When all members were found to be gone without a reported result; None: they are not, as far as is known."""
        self._reported = (0, 0.0)
        self._binding: int | None = None
        """The generation whose order gave the job its class of device."""

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The newest membership."""
        return self.newest.placements if self.newest else ()

    @property
    def has_started(self) -> bool:
        """Whether a generation was active since the last cold start."""
        newest = self.newest
        return newest is not None and bool(newest.placements) and not (newest.cold_start and self.is_settling)

    @property
    def is_settling(self) -> bool:
        """Whether the newest generation is not active yet."""
        return self.newest is not None and self.newest.generation > self.active_number

    @property
    def is_recovering(self) -> bool:
        """Whether a recovering generation is not active yet: until it is, only a newer one may be written over it."""
        return self.is_settling and self.newest is not None and self.newest.is_recovery

    @property
    def is_cold_starting(self) -> bool:
        """Whether the initial members have their order: until they train, nothing newer may be written over it."""
        newest = self.newest
        return newest is not None and bool(newest.placements) and newest.has_addresses and not self.has_started

    @property
    def is_bound_by_start(self) -> bool:
        """Whether the job had no class of device before the newest generation, a cold start that is not active."""
        return self.is_settling and self.newest is not None and self.newest.generation == self._binding

    @property
    def named(self) -> set[int]:
        """The workers of the newest, the active, and every ordered generation."""
        return {placement.worker for placement in (*self.placements, *self.possible_members)}

    @property
    def possible_members(self) -> list[Placement]:
        """The workers of the active generation, and of those that may be active by now; some may occur repeatedly."""
        orders = (order.placements for order in self.orders.values())
        return [placement for membership in (self.active, *orders) for placement in membership]

    @property
    def members(self) -> set[int]:
        """The workers of the active generation."""
        return {placement.worker for placement in self.active}

    @property
    def possible_hosts(self) -> set[str]:
        """The hosts that have members, or may have had some when this scheduler took over."""
        unreconciled = (slot.rpartition("/")[0] for slot in self.unreconciled_slots)
        return {*(placement.host for placement in self.possible_members), *unreconciled}

    def names(self, number: int) -> bool:
        """Whether the newest membership has this worker."""
        return any(placement.worker == number for placement in self.placements)

    def may_be_active(self, generation: int) -> bool:
        """Whether ``generation`` is active, or may be by now."""
        return generation == self.active_number or generation in self.orders

    def is_changing_to(self, generation: int) -> bool:
        """Whether ``generation`` is a planned change of the workers of the active one, and not active yet."""
        order = self.orders.get(generation) if generation > self.active_number else None
        if order is None or order.cold_start or order.is_recovery or not self.active:
            return False
        return {placement.worker for placement in order.placements} != self.members

    def moves_to(self, number: int) -> list[set[int]]:
        """Return the workers of each ordered generation in which no member stays, and that names worker ``number``."""
        ordered = ({p.worker for p in order.placements} for n, order in self.orders.items() if n > self.active_number)
        return [workers for workers in ordered if number in workers and workers.isdisjoint(self.members)]

    def write(self, allocation: Allocation) -> None:
        """Make ``allocation`` the newest generation."""
        self.newest = allocation
        if allocation.batch_size is not None:
            self.batch_size, self.is_batch_known = allocation.batch_size, True
        elif allocation.is_recovery:
            self.is_batch_known = False

    def bind(self) -> None:
        """Record that the newest generation gives the job its class of device."""
        self._binding = self.newest.generation if self.newest else None

    def order(self, placements: Sequence[Placement]) -> None:
        """Complete the newest generation with the addresses of its workers."""
        assert self.newest is not None
        self.newest = self.newest.model_copy(update={"placements": tuple(placements)})
        self.orders[self.newest.generation] = self.newest

    def activate(self, order: Allocation, *, iteration: int) -> None:
        """Record that ``order`` trains from ``iteration`` on."""
        self.active, self.active_number = order.placements, order.generation
        self.active_since, self.active_until = iteration, order.until
        self.orders = {number: newer for number, newer in self.orders.items() if number >= order.generation}
        self.unreconciled_slots = frozenset()
        self.gone_since = None

    def has_been_reported(self, generation: int, *, now: float) -> bool:
        """Record that a heartbeat names ``generation`` as active; return whether it has done so for a while.

        This gives the report of the switch, which is exact, time to arrive.
        """
        if self._reported[0] != generation:
            self._reported = (generation, now)
            return False
        return now - self._reported[1] >= REPORT_SECONDS

    def mark_gone(self, *, now: float) -> None:
        """Record that all members are gone."""
        self.gone_since = self.gone_since or now

    def abandon(self) -> None:
        """Forget what was ordered: all workers are stopped."""
        self.orders.clear()
        self.unreconciled_slots = frozenset()
        self.gone_since = None

    def deactivate(self) -> None:
        """Record that no generation trains."""
        self.active = ()

    def restore(self, allocation: Allocation, record: JobRecord) -> None:
        """Take over ``allocation``, which an earlier scheduler stored with ``record``."""
        self.newest = allocation
        self.batch_size = allocation.batch_size
        self.is_batch_known = allocation.batch_size is not None or (allocation.cold_start and not allocation.resume)
        is_active = allocation.generation <= self.active_number
        if self.has_started and not is_active and record.allocation:
            self.unreconciled_slots = frozenset(record.allocation.slots)
        # No new worker gets a slot of the active generation, so a worker on one of them is a member.
        self.active = tuple(p for p in allocation.placements if is_active or p.slot_name in self.unreconciled_slots)
        self.active_since = record.allocation.iteration if record.allocation else 0
        self.active_until = allocation.until if is_active else None
        if allocation.has_addresses and allocation.placements:
            self.orders[allocation.generation] = allocation
