"""The promises, checked while a world runs: `Checks` sees what is stored, and what the workers themselves did.

What is wrong is collected in ``broken``, in words; a world with any is a failure.
"""

from collections.abc import Mapping
from typing import Any

from resile_shared.messages.allocations import Allocation
from resile_shared.messages.jobs import JobEvent, JobRecord, JobState
from resile_shared.subjects import ALLOCATIONS, JOBS

from .plan import Script
from .server import Stored


class Checks:
    """What was seen so far in one world."""

    def __init__(self) -> None:
        self.broken: list[str] = []
        self.records: dict[str, JobRecord] = {}
        self.slots: dict[tuple[str, int], str] = {}
        """The slot of each worker, by job and worker, as the first allocation that named it said."""
        self.alive: dict[tuple[str, int], str] = {}
        """The slots of the worker processes that are alive."""
        self.states: dict[str, int] = {}
        """How often a record entered each state."""
        self.num_committed = 0
        self._epoch = 0
        self._generations: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._rounds: dict[tuple[str, int, int], Any] = {}

    def break_promise(self, what: str) -> None:
        """Record that a promise was broken."""
        if len(self.broken) < 20:
            self.broken.append(what)

    # what is stored

    def on_store(self, stored: Stored) -> None:
        """Look at a message that the bus has stored."""
        if stored.headers.get("KV-Operation"):
            return
        if stored.subject.startswith(ALLOCATIONS.prefix):
            self._on_allocation(Allocation.model_validate_json(stored.data))
        elif stored.subject.startswith(JOBS.prefix):
            self._on_record(JobRecord.model_validate_json(stored.data))
        elif stored.subject.startswith("resile.job."):
            self._on_event(JobEvent.model_validate_json(stored.data))

    def _on_allocation(self, allocation: Allocation) -> None:
        job = allocation.job
        if allocation.generation < self._generations.get(job, 0):
            self.break_promise(f"{job}: an allocation of an older generation was stored: {allocation.generation}")
        self._generations[job] = allocation.generation
        if allocation.epoch < self._epoch:
            self.break_promise(f"{job}: an allocation of the old epoch {allocation.epoch} was stored")
        self._epoch = max(self._epoch, allocation.epoch)
        for placement in allocation.placements:
            slot = f"{placement.slot_name} of incarnation {placement.incarnation}"
            known = self.slots.setdefault((job, placement.worker), slot)
            if known != slot:
                self.break_promise(f"{job}: worker {placement.worker} was on {known}, and is placed on {slot}")

    def _on_record(self, record: JobRecord) -> None:
        before = self.records.get(record.job)
        if before is None or before.state is not record.state:
            self.states[record.state.value] = self.states.get(record.state.value, 0) + 1
        if before is not None and before.state.is_final and record.state is not before.state:
            self.break_promise(f"{record.job} was {before.state}, and is {record.state} now")
        self.records[record.job] = record

    def _on_event(self, event: JobEvent) -> None:
        expected = self._numbers.get(event.job, 0) + 1
        if event.item.number != expected:
            self.break_promise(f"{event.job}: history item {event.item.number} was published after {expected - 1}")
        self._numbers[event.job] = max(expected, event.item.number)

    # what the workers did

    def worker_started(self, job: str, worker: int, host: str) -> None:
        """A worker's process runs."""
        slot = self.slots.get((job, worker), f"an unknown slot of {host}")
        name = slot.partition(" of ")[0]
        for other, taken in self.alive.items():
            if taken == name:
                self.break_promise(f"{name} has two workers: {other} and {(job, worker)}")
        self.alive[job, worker] = name

    def worker_ended(self, job: str, worker: int) -> None:
        """A worker's process is gone."""
        self.alive.pop((job, worker), None)

    def committed(self, job: str, lineage: int, round_: int, worker: int, chain: Any) -> None:
        """A member has committed a round, by whose end its state is ``chain``, generations included."""
        self.num_committed += 1
        known = self._rounds.setdefault((job, lineage, round_), (worker, chain))
        if known[1] != chain:
            self.break_promise(
                f"{job}: round {round_} of lineage {lineage} was committed in two ways, "
                f"by workers {known[0]} and {worker}: {known[1]} and {chain}"
            )

    # at the end

    def check_end(self, jobs: Mapping[int, str], scripts: Mapping[int, Script], stopped: set[str]) -> None:
        """Check how the jobs ended."""
        for number, job in jobs.items():
            record, script = self.records.get(job), scripts[number]
            if record is None:
                self.break_promise(f"{job} was accepted, and is not stored")
                continue
            self._check_history(record)
            if record.state is JobState.STOPPED and job not in stopped:
                self.break_promise(f"{job} was stopped by nobody")
            if record.state is JobState.FAILED and script.can_complete:
                self.break_promise(f"{job} failed, and nothing was wrong with it: {record.reason}")
            if record.state is JobState.COMPLETED:
                self._check_completed(record, script)

    def _check_history(self, record: JobRecord) -> None:
        published = self._numbers.get(record.job, 0)
        if published != len(record.history):
            self.break_promise(f"{record.job}: {published} of {len(record.history)} items of its history are published")

    def _check_completed(self, record: JobRecord, script: Script) -> None:
        completed = record.completed
        if not script.can_complete:
            self.break_promise(f"{record.job} is completed, though its script cannot complete")
        if completed is None:
            self.break_promise(f"{record.job} is completed without a result")
            return
        if completed.iteration != script.iterations:
            self.break_promise(f"{record.job} is completed at iteration {completed.iteration} of {script.iterations}")
        if any(epoch.more or epoch.never for epoch in completed.ledger):
            self.break_promise(f"{record.job}: its ledger is not exact: {completed.ledger}")
