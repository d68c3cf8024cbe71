"""The promises, checked while a world runs: `Checks` sees what is stored, and what the workers themselves did.

What is wrong is collected in ``broken``, in words; a world with any is a failure.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from resile_learner.checkpoint.lineage import Start
from resile_learner.checkpoint.manifest import Manifest
from resile_shared.bus.subjects import ALLOCATIONS, HOSTS, JOBS
from resile_shared.messages.allocations import Allocation
from resile_shared.messages.hosts import HostRecord, HostState
from resile_shared.messages.jobs import Intent, JobEvent, JobRecord, JobState
from resile_shared.messages.reports import Completed

from .server import Stored
from .sharing import SharingChecks
from .training import Begun, Commit, SimScript

PUBLISHED_SECONDS = 10.0
"""Within so long a calm world publishes what is stored of a history."""
MAX_IDLE_GENERATIONS = 50
"""A job that gets so many generations and trains in none of them is in a livelock: most worlds stay below 10."""


class Checks:
    """What was seen so far in one world."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.labels = labels
        """Those of each host that has any."""
        self.broken: list[str] = []
        self.records: dict[str, JobRecord] = {}
        self.slots: dict[tuple[str, int], str] = {}
        """The slot of each worker, by job and worker, as the first allocation that named it said."""
        self.alive: dict[tuple[str, int], str] = {}
        """The slots of the worker processes that are alive."""
        self.stored: Counter[str] = Counter()
        """How often an allocation of each job was stored."""
        self.sent: Counter[tuple[str, str]] = Counter()
        """How often each host was sent an allocation of each job."""
        self.states: dict[str, int] = {}
        """How often a record entered each state."""
        self.removed: set[str] = set()
        """The jobs whose records were removed."""
        self._outlived: set[str] = set()
        """Of these, those with workers that ran nevertheless, on hosts that were lost."""
        self._hosts_there: set[str] = set()
        """The hosts that are not lost and have not left."""
        self.num_committed = 0
        self.is_livelocked = False
        self.has_damage = False
        """Whether checkpoints were damaged, so that older ones have to do."""
        self._epoch = 0
        self._generations: dict[str, int] = {}
        self._idle_generations: Counter[str] = Counter()
        """How many generations each job has got since a member committed an iteration."""
        self._numbers: dict[str, int] = {}
        self._starts: dict[str, dict[int, bool]] = {}
        """The generations of each job that are cold starts, and whether it had a checkpoint then."""
        self._members: dict[tuple[str, int], frozenset[int]] = {}
        """The workers of each generation of each job."""
        self._hosts: dict[str, set[str]] = {}
        """The hosts on which each job was ever given a slot."""
        self._begun: set[tuple[str, int]] = set()
        """The cold starts of jobs by which something was trained."""
        self._started: set[tuple[str, int]] = set()
        """The workers whose processes were started."""
        self._saved: dict[str, int] = {}
        """The jobs that gave their slots up as planned, and the iteration that was saved."""
        self._furthest: dict[str, int] = {}
        """The newest iteration that a member of each job has committed since its last cold start."""
        self._iterations: dict[tuple[str, int, int], list[Commit]] = {}
        """The commits of each iteration of each cold start of each job."""
        self._first: dict[tuple[str, int], int] = {}
        """The iteration with which the first member of a cold start began."""
        self._stored_at: dict[str, float] = {}
        """When the record of each job was stored last, in a calm world."""
        self.sharing = SharingChecks(self.break_promise, lambda job: self.records[job].spec.tenant)
        self._writers: dict[str, int] = {}
        """The cold start whose members have stored each final model."""

    def break_promise(self, what: str) -> None:
        """Record that a promise was broken."""
        if len(self.broken) < 20:
            self.broken.append(what)

    # what is stored

    def on_store(self, stored: Stored, objects: Mapping[str, bytes], *, calm_for: float) -> JobEvent | None:
        """Look at a message that the bus has stored; return it if it is an item of a history.

        ``objects`` are those of the object store by then; the world has been calm for ``calm_for`` seconds.
        """
        if stored.subject == JOBS.fence:  # another scheduler leads, and does not know yet what is published
            self._stored_at.clear()
        if stored.subject in (JOBS.fence, ALLOCATIONS.fence):
            return None
        if stored.headers.get("KV-Operation"):
            if stored.subject.startswith(JOBS.prefix):
                self._on_removed(stored.subject.removeprefix(JOBS.prefix), objects)
            return None
        if stored.subject.startswith(ALLOCATIONS.prefix):
            self._on_allocation(Allocation.model_validate_json(stored.data), objects)
        elif stored.subject.startswith(JOBS.prefix):
            self._on_record(JobRecord.model_validate_json(stored.data), calm_for)
        elif stored.subject.startswith(HOSTS.prefix):
            self._on_host(HostRecord.model_validate_json(stored.data))
        elif stored.subject.startswith("resile.job."):
            event = JobEvent.model_validate_json(stored.data)
            self._on_event(event)
            return event
        else:
            self.sharing.on_store(stored)
        return None

    def _on_host(self, record: HostRecord) -> None:
        is_there = record.state in (HostState.UP, HostState.DRAINING)
        (self._hosts_there.add if is_there else self._hosts_there.discard)(record.host)

    def _on_allocation(self, allocation: Allocation, objects: Mapping[str, bytes]) -> None:
        job = allocation.job
        self.stored[job] += 1
        if allocation.cold_start and allocation.generation not in self._starts.setdefault(job, {}):
            begun = f"storage/jobs/{job}/checkpoints/"
            has_checkpoint = any(key.startswith(begun) and key.endswith("manifest.json") for key in objects)
            self._starts[job][allocation.generation] = has_checkpoint
        if allocation.generation < self._generations.get(job, 0):
            self.break_promise(f"{job}: an allocation of an older generation was stored: {allocation.generation}")
        self._count_idle(allocation)
        self._generations[job] = allocation.generation
        if allocation.epoch < self._epoch:
            self.break_promise(f"{job}: an allocation of the old epoch {allocation.epoch} was stored")
        self._epoch = max(self._epoch, allocation.epoch)
        self._members[job, allocation.generation] = frozenset(p.worker for p in allocation.placements)
        self._hosts.setdefault(job, set()).update(placement.host for placement in allocation.placements)
        self.sharing.on_allocation(allocation)
        for placement in allocation.placements:
            slot = f"{placement.slot_name} of incarnation {placement.incarnation}"
            known = self.slots.setdefault((job, placement.worker), slot)
            if known != slot:
                self.break_promise(f"{job}: worker {placement.worker} was on {known}, and is placed on {slot}")

    def _count_idle(self, allocation: Allocation) -> None:
        job = allocation.job
        self._idle_generations[job] += allocation.generation > self._generations.get(job, 0)
        if self._idle_generations[job] > MAX_IDLE_GENERATIONS and not self.is_livelocked:
            self.is_livelocked = True
            self.break_promise(f"{job} has got {MAX_IDLE_GENERATIONS} generations in a row and trains in none")

    def _on_record(self, record: JobRecord, calm_for: float) -> None:
        before = self.records.get(record.job)
        if record.job in self.removed:
            self.break_promise(f"{record.job} was removed, and is stored again")
        self._check_size(record, before, calm_for)
        if before is None or before.state is not record.state:
            self.states[record.state.value] = self.states.get(record.state.value, 0) + 1
        if before is not None and before.state.is_final and record.state is not before.state:
            self.break_promise(f"{record.job} was {before.state}, and is {record.state} now")
        self.records[record.job] = record
        if before is not None and before.intent is not Intent.TRAIN and record.intent is Intent.TRAIN:
            self._on_saved(record)

    def _on_removed(self, job: str, objects: Mapping[str, bytes]) -> None:
        """The record of a job is removed: it has ended, no worker of it runs, and nothing else is stored of it."""
        self.removed.add(job)
        record = self.records[job]
        if not (record.is_deleted and record.state.is_final):
            self.break_promise(f"{job} is removed, though it is {record.state} and nobody has deleted it")
        for (other, worker), slot in self.alive.items():
            if other == job:
                self._outlived.add(job)
                if slot.partition("/")[0] in self._hosts_there:
                    self.break_promise(f"{job} is removed, and its worker {worker} runs on {slot}")
        for key in self._left_of(job, objects):
            self.break_promise(f"{job} is removed, and {key} is still stored")

    def _left_of(self, job: str, objects: Iterable[str]) -> list[str]:
        """Return which objects are left of a removed job: only the results of one that nobody deleted may be."""
        folder = f"storage/jobs/{job}/"
        gone = f"{folder}checkpoints/" if self.records[job].keeps_results else folder
        return [key for key in objects if key.startswith(gone)]

    def _check_size(self, record: JobRecord, before: JobRecord | None, calm_for: float) -> None:
        """A record holds what is new in the history, and not what was published long ago."""
        stored_at = self._stored_at.get(record.job)
        if calm_for <= 0:
            return
        self._stored_at[record.job] = calm_for
        if before is None or stored_at is None or calm_for - stored_at < PUBLISHED_SECONDS:
            return
        if old := sum(item.number <= before.num_items for item in record.unpublished):
            self.break_promise(f"the record of {record.job} still has {old} items that it has had for long")

    def _on_saved(self, record: JobRecord) -> None:
        """A job that was paused or suspended has given its slots up."""
        job, furthest = record.job, self._furthest.get(record.job)
        if furthest is None or record.reason not in ("requested", "saved, waiting for slots again"):
            return
        self._saved[job] = record.iteration
        if record.iteration < furthest:  # an evicted member may have committed one more
            self.break_promise(f"{job} was saved at iteration {record.iteration}, and had committed {furthest}")

    def _on_event(self, event: JobEvent) -> None:
        expected = self._numbers.get(event.job, 0) + 1
        if event.item.number != expected:
            self.break_promise(f"{event.job}: history item {event.item.number} was published after {expected - 1}")
        self._numbers[event.job] = max(expected, event.item.number)

    # what agents are sent

    def allocation_sent(self, host: str, job: str) -> None:
        """An agent is sent an allocation of ``job``."""
        self.sent[host, job] += 1
        if host not in self._hosts.get(job, ()):
            self.break_promise(f"{host} is sent an allocation of {job}, which never had a worker there")

    # what the workers did

    def worker_started(self, job: str, worker: int, host: str) -> None:
        """A worker's process runs."""
        slot = self.slots.get((job, worker), f"an unknown slot of {host}")
        name = slot.partition(" of ")[0]
        if (job, worker) in self._started:
            self.break_promise(f"worker {worker} of {job} was started twice")
        self._started.add((job, worker))
        group = self.records[job].spec.group
        if group and not set(group.split(",")) <= set(self.labels.get(host, "").split(",")):
            self.break_promise(f"worker {worker} of {job}, which asks for {group}, is started on {host}")
        for other, taken in self.alive.items():
            if taken == name:
                self.break_promise(f"{name} has two workers: {other} and {(job, worker)}")
        self.alive[job, worker] = name

    def worker_ended(self, job: str, worker: int) -> None:
        """A worker's process is gone."""
        self.alive.pop((job, worker), None)

    def on_write(self, key: str, content: bytes, objects: Mapping[str, bytes], *, start: int) -> None:
        """An object is about to be written beside ``objects`` by a member whose state goes back to ``start``.

        A manifest is written once, after all of its parts; a model by the members of one cold start alone. What members
        that are cut off store after their job was deleted is not looked at: parts of it are removed by then.
        """
        job = key.removeprefix("storage/jobs/").partition("/")[0]
        if job in self.records and self.records[job].is_deleted:
            return
        if "/models/" in key and self._writers.setdefault(key, start) != start:
            self.break_promise(f"{key} is stored by members of the cold starts {self._writers[key]} and {start}")
        if not key.endswith("/manifest.json"):
            return
        if objects.get(key, content) != content:
            self.break_promise(f"{key} was replaced")
        folder = key.removesuffix("manifest.json")
        parts = Manifest.model_validate_json(content).parts
        if [part.number for part in parts] != list(range(len(parts))):
            self.break_promise(f"{key} has the parts {[part.number for part in parts]} only")
        for part in parts:
            if len(objects.get(f"{folder}part-{part.number:05d}", b"")) != part.num_bytes:
                self.break_promise(f"{key} is stored before its part {part.number}")

    def on_delete(self, key: str, objects: Mapping[str, bytes]) -> None:
        """An object is about to be deleted: of a checkpoint its manifest comes first.

        The checkpoint of a start is kept until its members have a newer one. Of a deleted job all may go at once.
        """
        job = key.removeprefix("storage/jobs/").partition("/")[0]
        if key.startswith("storage/packages/"):
            self._check_package(key)
        if job in self.records and self.records[job].is_deleted:
            return
        checkpoint, is_part, _ = key.partition("/part-")
        if is_part and f"{checkpoint}/manifest.json" in objects:
            self.break_promise(f"{key} is deleted before the manifest of its checkpoint")
        folder, _, name = key.removesuffix("/manifest.json").partition("/checkpoints/")
        if not key.endswith("/manifest.json") or self.has_damage:
            return
        lineages = f"{folder}/checkpoints/lineage-"
        starts = [Start.model_validate_json(objects[k]) for k in objects if k.startswith(lineages) and "/start." in k]
        newest = max(starts, key=lambda start: start.lineage, default=None)
        if newest is None or newest.checkpoint != name:
            return
        own = f"{lineages}{newest.lineage}/"
        if not any(k.startswith(own) and k.endswith("/manifest.json") for k in objects):
            self.break_promise(f"{key} is deleted, and start {newest.lineage} of the job has no other checkpoint")

    def _check_package(self, key: str) -> None:
        for job, record in self.records.items():
            if key == f"storage/{record.spec.package}" and not (record.is_deleted or record.state.is_final):
                self.break_promise(f"{key} is deleted, and {job} needs it")

    def begun(self, begun: Begun) -> None:
        """An initial member has its state: that of all others, and not of members that the job went on without."""
        job = begun.job
        first = self._first.setdefault((job, begun.generation), begun.iteration)
        if first != begun.iteration:
            self.break_promise(
                f"{job}: members of generation {begun.generation} begin with iterations {first} and {begun.iteration}"
            )
        trained_by = begun.spans[-1][0] if begun.spans else 0
        for (other, start), iteration in self._first.items():
            if other == job and trained_by < start < begun.generation and iteration < begun.iteration:
                self.break_promise(
                    f"{job}: generation {begun.generation} begins with iteration {begun.iteration} of generation "
                    f"{trained_by}, though generation {start} had started from {iteration}"
                )

    def committed(self, commit: Commit) -> None:
        """A member has committed an iteration."""
        self.num_committed += 1
        job = commit.job
        self._idle_generations[job] = 0
        starts = self._starts.get(job, {})
        start = max((generation for generation in starts if generation <= commit.generation), default=0)
        if (job, start) not in self._begun:
            self._on_begun(commit, start)
        if start == max(starts, default=0):
            self._furthest[job] = max(self._furthest.get(job, 0), commit.iteration)
        known = self._iterations.setdefault((job, start, commit.iteration), [])
        known.append(commit)
        if commit.generation == start and known[0].generation == start and known[0].dataset != commit.dataset:
            self.break_promise(f"{job}: workers {known[0].worker} and {commit.worker} train with different data")
        if known[0].chain != commit.chain:
            self.break_promise(f"{job}: workers {known[0].worker} and {commit.worker} differ after {commit.iteration}")
        for earlier in known:
            if earlier.generation != commit.generation and not self._was_evicted(earlier, commit):
                self.break_promise(
                    f"{job}: iteration {commit.iteration} was committed by worker {earlier.worker} in generation "
                    f"{earlier.generation}, and by worker {commit.worker} in generation {commit.generation}"
                )
        if commit.iteration == 0 and starts.get(start):
            self.break_promise(f"{job}: generation {start} starts from 0 beside a complete checkpoint")

    def _on_begun(self, commit: Commit, start: int) -> None:
        """The first iteration of a cold start is committed."""
        job = commit.job
        self._begun.add((job, start))
        self._furthest.pop(job, None)
        saved = self._saved.pop(job, None)
        if saved is not None and commit.iteration != saved and not self.has_damage:
            self.break_promise(f"{job} was saved at iteration {saved}, and goes on from {commit.iteration}")

    def _was_evicted(self, one: Commit, other: Commit) -> bool:
        """Whether a recovery went on without a worker that had committed more than the others knew."""
        older, newer = sorted((one, other), key=lambda commit: commit.generation)
        return older.worker not in self._members.get((older.job, newer.generation), ())

    # at the end

    def have_ended(self, jobs: Iterable[str], deleted: Collection[str]) -> bool:
        """Whether all ``jobs`` have ended, and those that are ``deleted`` are removed."""
        ended = {job for job, record in self.records.items() if record.state.is_final and job not in deleted}
        return (ended | self.removed).issuperset(jobs)

    def is_published(self) -> bool:
        """Whether the history of all jobs is published, and all changes of the policy and of tenants are."""
        records = (record for job, record in self.records.items() if job not in self.removed)
        return self.sharing.is_published() and all(self._numbers.get(r.job, 0) == r.num_items for r in records)

    def check_end(self, jobs: Mapping[int, str], scripts: Mapping[int, SimScript], excused: set[str]) -> None:
        """Check how the jobs ended. Those that are ``excused`` may have failed or stopped."""
        for number, job in jobs.items():
            record = self.records.get(job)
            if record is None:
                self.break_promise(f"{job} was accepted, and is not stored")
                continue
            if job not in self.removed:
                self._check_history(record)
            if record.state is JobState.STOPPED and job not in excused:
                self.break_promise(f"{job} was stopped by nobody")
            if record.state is JobState.FAILED and scripts[number].can_complete and job not in excused:
                self.break_promise(f"{job} failed, and nothing was wrong with it: {record.reason}")

    def check_results(
        self,
        jobs: Mapping[int, str],
        scripts: Mapping[int, SimScript],
        objects: Mapping[str, bytes],
        *,
        kinds: Collection[int],
    ) -> None:
        """Check what is stored of the jobs that have completed. There are hosts of ``kinds``."""
        for number, job in jobs.items():
            record = self.records.get(job)
            if record is not None and record.state is JobState.COMPLETED:
                self._check_completed(record, scripts[number], objects, kinds)

    def check_gangs(self, finished: Mapping[str, Collection[int]]) -> None:
        """Check that gangs have completed only if all workers of one start have ``finished`` their scripts."""
        for job, workers in finished.items():
            record = self.records.get(job)
            starts = [members for (name, _), members in self._members.items() if name == job and members]
            is_complete = any(members <= set(workers) for members in starts)
            if record is not None and record.state is JobState.COMPLETED and not is_complete:
                self.break_promise(f"{job} is completed, and of no start all workers have finished: {sorted(workers)}")

    def check_packages(self, objects: Collection[str], excused: Collection[str]) -> None:
        """Check that ``objects`` have the packages of all jobs that nobody has deleted, but for those ``excused``."""
        for job, record in self.records.items():
            is_kept = job not in excused and job not in self.removed and not record.is_deleted
            if is_kept and f"storage/{record.spec.package}" not in objects:
                self.break_promise(f"{job} was accepted, and its package {record.spec.package} is gone")

    def check_removed(self, objects: Collection[str]) -> None:
        """Check that nothing of removed jobs is left among ``objects``."""
        for job in sorted(self.removed - self._outlived):  # what is cut off may go on storing for a while
            for key in self._left_of(job, objects):
                self.break_promise(f"{job} was removed, and {key} is left of it")

    def check_missing(self, jobs: Collection[str]) -> None:
        """Jobs whose packages do not exist have ended, and never had a slot."""
        for job in jobs:
            if self._hosts.get(job):
                self.break_promise(f"{job} had slots on {sorted(self._hosts[job])}, and its packages do not exist")
            record = self.records.get(job)
            if record is not None and record.state is JobState.COMPLETED:
                self.break_promise(f"{job} completed without packages that it requires")

    def _check_history(self, record: JobRecord) -> None:
        published = self._numbers.get(record.job, 0)
        if published != record.num_items:
            self.break_promise(f"{record.job}: {published} of {record.num_items} items of its history are published")

    def _check_completed(
        self, record: JobRecord, script: SimScript, objects: Mapping[str, bytes], kinds: Collection[int]
    ) -> None:
        completed = record.completed
        if completed is None:
            self.break_promise(f"{record.job} is completed without a result")
            return
        if script.most_batch is None or completed.batches:  # a bus that was full may have stored it in brief
            self._check_params(record.job, completed, script, kinds)
        stored = objects.get(f"storage/jobs/{record.job}/{completed.model}", b"")
        if stored.hex() != completed.params_sha256:
            self.break_promise(f"{record.job}: the stored model {completed.model} is not the one of its completion")
        if any(epoch.more or epoch.never for epoch in completed.ledger):
            self.break_promise(f"{record.job}: its ledger is not exact: {completed.ledger}")

    def _check_params(self, job: str, completed: Completed, script: SimScript, kinds: Collection[int]) -> None:
        """Compare a result with undisturbed runs: those of the same batches, if the pool could choose them."""
        least, most = script.batch_size, script.most_batch or script.batch_size
        if any(not least <= step.batch_size <= most for step in completed.batches):
            self.break_promise(f"{job} had batches beyond its range from {least} to {most}: {completed.batches}")
            return
        runs = [script.undisturbed(kind, batches=completed.batches) for kind in kinds]
        if completed.iteration != runs[0][0]:
            self.break_promise(f"{job} is completed at iteration {completed.iteration} of {runs[0][0]}")
        if completed.params_sha256 not in [params_sha256 for _, params_sha256 in runs]:
            self.break_promise(f"{job} is completed with other parameters than an undisturbed run")
