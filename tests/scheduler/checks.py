"""What must be true of a simulated pool at every moment."""

from resile_scheduler.core.placement import SlotId
from resile_scheduler.simulator import Simulator
from resile_shared.messages.allocations import Allocation
from resile_shared.messages.hosts import HostState
from resile_shared.messages.jobs import JobRecord


class Checker:
    """Looks at a simulator after each step; what it stored is compared with what it stored before."""

    def __init__(self, sim: Simulator) -> None:
        self.sim = sim
        self.records: dict[str, JobRecord] = {}
        self.newest: dict[str, Allocation] = {}
        self.dropped: dict[str, set[int]] = {}
        self.used: dict[str, int] = {}
        self._num_allocations = 0

    def check(self) -> None:
        self._histories()
        for allocation in self.sim.allocations[self._num_allocations :]:
            self._allocation(allocation)
        self._num_allocations = len(self.sim.allocations)
        self._slots()

    def _histories(self) -> None:
        for job, record in self.sim.records.items():
            before = self.records.get(job)
            if before is record:
                continue
            assert [item.number for item in record.history] == list(range(1, len(record.history) + 1))
            if before is not None:
                assert record.history[: len(before.history)] == before.history, "history is only added to"
                assert record.applied_commands[: len(before.applied_commands)] == before.applied_commands
                assert record.generation >= before.generation
                assert record.next_worker >= before.next_worker
                assert not before.state.is_final or record == before, "nothing follows the end"
            self.records[job] = record

    def _allocation(self, allocation: Allocation) -> None:
        job, before = allocation.job, self.newest.get(allocation.job)
        numbers = [placement.worker for placement in allocation.placements]
        assert numbers == sorted(numbers), "joiners have higher ids"
        assert max(numbers, default=-1) < self.records[job].next_worker, "ids are stored before they are used"
        dropped = self.dropped.setdefault(job, set())
        if allocation.is_recovery:
            assert set(numbers) <= self.sim.trained(job), "who recovers has the state"
            dropped -= set(numbers)
        else:
            assert not dropped & set(numbers), "a dropped worker is never named again"
        if before is not None:
            assert (allocation.epoch, allocation.generation) >= (before.epoch, before.generation)
            if allocation.generation == before.generation:
                assert numbers == [placement.worker for placement in before.placements]
            else:
                old = {placement.worker for placement in before.placements}
                is_new = [number >= self.used[job] for number in numbers if number not in old]
                assert allocation.is_recovery or all(is_new), "joiners have new ids"
                dropped |= old - set(numbers)
                is_pending = before.is_recovery and before.generation > self.records[job].generation
                is_allowed = allocation.is_recovery or allocation.cold_start or not numbers
                assert is_allowed or not is_pending, "a recovery is not written over"
        self.used[job] = max(self.used.get(job, 0), max(numbers, default=-1) + 1)
        if allocation.cold_start and before is not None and allocation.generation > before.generation:
            is_new_life = not {placement.worker for placement in before.placements} & set(numbers)
            assert is_new_life or not before.has_addresses, "an ordered founding is not written over"
        self.newest[job] = allocation

    def _slots(self) -> None:
        pool = self.sim.scheduler.pool
        workers = [
            (worker.slot, job.id, worker.number) for job in pool.jobs.values() for worker in job.workers.values()
        ]
        assert {slot: (job, number) for slot, job, number in workers} == pool.holders
        assert len(workers) == len(pool.holders), "no slot is held twice"
        active = [(p.host, p.slot) for job in pool.jobs.values() if not job.is_over for p in job.active]
        assert len(set(active)) == len(active), "the history never shows a slot twice"
        named = [(p.host, p.slot) for job in pool.jobs.values() for p in job.placements]
        assert len(set(named)) == len(named), "no slot is given to two jobs"

    def free_slots(self) -> list[SlotId]:
        pool = self.sim.scheduler.pool
        return [slot for host in pool.hosts.values() for slot in host.slots if pool.is_free(slot)]

    def usable(self) -> int:
        hosts = self.sim.scheduler.pool.hosts.values()
        return sum(len(host.slots) for host in hosts if host.record.state is HostState.UP)

    def allocated(self) -> dict[str, int]:
        return {job.id: len(job.placements) for job in self.sim.scheduler.pool.jobs.values() if job.placements}
