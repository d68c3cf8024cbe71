"""What must be true of a simulated pool after each step."""

from resile_scheduler.simulation.simulated_pool import SimulatedPool
from resile_shared.messages.allocations import Allocation
from resile_shared.messages.hosts import HostState
from resile_shared.messages.jobs import JobRecord


class Checker:
    """Checks a simulated pool after each step; what it stored is compared with what it stored before."""

    def __init__(self, sim: SimulatedPool) -> None:
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
        for job in self.sim.records:
            watching = {host for host, jobs in self.sim.assigned.items() if job in jobs}
            assert self.sim.hosts_of(job) <= watching, "the agents of all its workers watch a job's allocations"

    def _histories(self) -> None:
        for job, record in self.sim.records.items():
            before = self.records.get(job)
            if before is record:
                continue
            history = self.sim.histories[job]
            assert [item.number for item in history] == list(range(1, record.num_items + 1))
            if before is not None:
                assert record.applied_commands[: len(before.applied_commands)] == before.applied_commands
                assert record.generation >= before.generation
                assert record.next_worker >= before.next_worker
                is_left = record.model_copy(update={"is_deleted": before.is_deleted}) == before
                assert not before.state.is_final or is_left, "nothing follows the end"
            self.records[job] = record

    def _allocation(self, allocation: Allocation) -> None:
        job, before = allocation.job, self.newest.get(allocation.job)
        numbers = [placement.worker for placement in allocation.placements]
        assert len({*numbers}) == len(numbers)
        assert max(numbers, default=-1) < self.records[job].next_worker, "ids are stored before they are used"
        sizes, num_before = self.records[job].spec.sizes, len(before.placements) if before else 0
        ready = self.records[job].ready
        is_allowed = not sizes or len(numbers) in (0, *sizes, ready.num_shards if ready else 0)
        assert is_allowed or len(numbers) <= num_before, "a job starts with an allowed size, and grows to one"
        dropped = self.dropped.setdefault(job, set())
        if allocation.is_recovery:
            assert set(numbers) <= self.sim.trained(job), "a recovery names workers that have the state"
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
            assert is_new_life or not before.has_addresses, "an ordered cold start is not written over"
        self.newest[job] = allocation

    def _slots(self) -> None:
        records = self.sim.records.values()
        newest = [self.sim.histories[record.job][-1] for record in records if not record.state.is_final]
        active = [slot for item in newest for slot in item.slots]
        assert len(set(active)) == len(active), "the history never shows a slot twice"
        named = [(job, placement.slot_name) for job, newest in self.newest.items() for placement in newest.placements]
        assert len({slot for _, slot in named}) == len(named), "no slot is given to two jobs"
        assert set(named) <= {(job, slot) for slot, job in self.sim.scheduler.holders().items()}, (
            "a named worker holds its slot"
        )

    def free_slots(self) -> set[str]:
        """The slots of hosts that are up and that no worker holds."""
        return self.usable() - self.sim.scheduler.holders().keys()

    def usable(self) -> set[str]:
        hosts = [host for host in self.sim.hosts.values() if host.state is HostState.UP]
        return {f"{host.host}/{slot.index}" for host in hosts for slot in host.slots}

    def allocated(self) -> dict[str, int]:
        sizes = {allocation.job: len(allocation.placements) for allocation in self.sim.allocations}
        return {job: sizes[job] for job in self.sim.records if sizes.get(job)}
