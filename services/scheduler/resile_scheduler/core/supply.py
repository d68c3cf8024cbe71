"""Which slots jobs may be given: those that nobody holds, and those that are about to become free."""

from .job import Job
from .placement import SlotId, SlotsByHost, by_host
from .pool import Pool


class Supply:
    """The free slots of the pool, and those that are being released. Jobs are looked at when they have changed."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._leaving: dict[str, tuple[SlotId, ...]] = {}
        """The slots of workers that leave, by job."""
        self._unreconciled: dict[str, frozenset[str]] = {}
        """The slots on which jobs may have workers that this scheduler does not know."""

    def look_at(self, job: Job) -> None:
        """See which slots ``job`` releases."""
        held = frozenset(job.held.values())
        leaving = tuple(worker.slot for worker in job.workers.values() if job.is_over or worker.slot not in held)
        self._leaving.pop(job.id, None)
        if leaving:
            self._leaving[job.id] = leaving
        self._unreconciled.pop(job.id, None)
        if job.generations.unreconciled_slots:
            self._unreconciled[job.id] = job.generations.unreconciled_slots

    def free(self) -> SlotsByHost:
        """Return the slots on which workers may be started now, by host."""
        free = self._pool.free_slots()
        if not self._unreconciled:
            return free
        return by_host(slot for of_host in free.values() for slot in of_host if self.is_free(slot))

    def is_free(self, slot: SlotId) -> bool:
        """Whether a worker may be started on ``slot`` now."""
        is_unreconciled = any(slot.name in names for names in self._unreconciled.values())
        return not is_unreconciled and self._pool.is_free(slot)

    def released(self) -> SlotsByHost:
        """Return the slots that are not free yet and that no job keeps, by host."""
        leaving = (slot for slots in self._leaving.values() for slot in slots)
        unknown = (slot for name in self._pool.unheard for slot in self._pool.hosts[name].slots)
        names = frozenset().union(*self._unreconciled.values())
        unreconciled = (SlotId(*_parts(name)) for name in sorted(names))
        unheld = {slot for slot in (*unknown, *unreconciled) if slot not in self._pool.holders}
        return by_host(slot for slot in (*leaving, *unheld) if self._pool.is_usable(slot))


def _parts(slot_name: str) -> tuple[str, int]:
    host, _, number = slot_name.rpartition("/")
    return host, int(number)
