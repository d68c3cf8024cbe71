"""Which slots jobs may be given: those that nobody holds, and those that are about to become free."""

from itertools import chain

from ..state.job import Job
from ..state.pool import Pool
from ..state.slot_sets import SlotId, SlotsByHost, by_host, merged, without
from .devices import SharedDevices


class Supply:
    """The free slots of the pool, and those that are being released. Jobs are looked at when they have changed."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._leaving: dict[str, tuple[SlotId, ...]] = {}
        """The slots of workers that leave, by job."""
        self._unreconciled: dict[str, frozenset[SlotId]] = {}
        """The slots on which a job may have workers that this scheduler does not know, by job."""

    def look_at(self, job: Job) -> None:
        """Find which slots ``job`` releases."""
        held = frozenset(job.held.values())
        leaving = tuple(worker.slot for worker in job.workers.values() if job.is_over or worker.slot not in held)
        self._leaving.pop(job.id, None)
        if leaving:
            self._leaving[job.id] = leaving
        self._unreconciled.pop(job.id, None)
        if job.generations.unreconciled_slots:
            self._unreconciled[job.id] = frozenset(map(_slot, job.generations.unreconciled_slots))

    def free(self) -> SlotsByHost:
        """Return the slots on which workers may be started now, by host, in the order in which they should be given."""
        free = without(self._pool.free_slots(), frozenset().union(*self._unreconciled.values()))
        shared = [host for host in free if self._pool.hosts[host].shared_devices]
        devices = self.devices() if shared else SharedDevices()
        return {**free, **{host: devices.in_order(host, free[host]) for host in shared}}

    def devices(self) -> SharedDevices:
        """Return how workers share devices."""
        leaving = frozenset(chain(*self._leaving.values(), *self._unreconciled.values()))
        return SharedDevices(self._pool.hosts, held=self._pool.holders, leaving=leaving)

    def is_free(self, slot: SlotId) -> bool:
        """Whether a worker may be started on ``slot`` now."""
        return self._pool.is_free(slot) and not any(slot in slots for slots in self._unreconciled.values())

    def released(self) -> SlotsByHost:
        """Return the slots that are not free yet and that no job keeps, by host."""
        leaving = chain.from_iterable(self._leaving.values())
        unreconciled = (slot for slot in chain(*self._unreconciled.values()) if slot not in self._pool.holders)
        usable = by_host(slot for slot in chain(leaving, unreconciled) if self._pool.is_usable(slot))
        return merged(self._pool.unheard_slots(), usable)


def _slot(name: str) -> SlotId:
    host, _, number = name.rpartition("/")
    return SlotId(host, int(number))
