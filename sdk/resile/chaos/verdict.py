"""Which promises broke, from the pool's events, the final state of its jobs, and an undisturbed run.

Also from the agents' logs and from stored models, of which only `stored_sha256` reads a file; all else is pure.
"""

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from resile_shared.http.api import JobView
from resile_shared.messages.jobs import HistoryItem, JobEvent, JobState

from ..demo.verdict import used_once
from ..pool.worker_processes import RunningWorker
from .attacks import AttackKind
from .members import HOLDS_NOTHING, MemberCommit, Saved, faults_of_members
from .observation import Commit, Observations
from .recovery_watch import PATIENCE_SECONDS, InjectedAttack, PartRecovery

_STARTED = re.compile(r"^(\S+) .*: starting worker job=(\S+) worker=(\d+) slot=(\d+)")
_EXITED = re.compile(r"^(\S+) .*: worker exited job=(\S+) worker=(\d+):")
_TERMINATED = re.compile(r"killed by (SIGTERM|SIGINT)")
_INCARNATION = re.compile(r": starting agent host=(\S+) incarnation=(\d+)")
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


def slots_with_two_workers(host: str, log: str) -> Iterator[str]:
    """Yield each moment at which a worker was started on a slot whose last one had not ended.

    An incarnation of an agent begins when no process of the one before is left.
    """
    holders: dict[str, tuple[str, str]] = {}
    for line in log.splitlines():
        if _INCARNATION.search(line):
            holders.clear()
        elif started := _STARTED.match(line):
            time, job, worker, slot = started.groups()
            if slot in holders:
                other, number = holders[slot]
                yield f"{host}/{slot}: worker {worker} of {job} was started at {time}, worker {number} of {other} lives"
            holders[slot] = job, worker
        elif exited := _EXITED.match(line):
            _, job, worker = exited.groups()
            holders = {slot: holder for slot, holder in holders.items() if holder != (job, worker)}


def ended_by_signals(host: str, log: str) -> Iterator[str]:
    """Yield each worker that ended by a signal that all processes of a machine may get, at its shutdown."""
    for line in log.splitlines():
        if (exited := _EXITED.match(line)) and (found := _TERMINATED.search(line)):
            time, job, worker = exited.groups()
            yield f"{host}: worker {worker} of {job} ended by {found[1]} at {time}"


@dataclass(frozen=True)
class Skipped:
    """An attack that could not be carried out, and why."""

    attack: str
    reason: str


@dataclass(frozen=True)
class Outcome:
    """One attack, and the recovery of the parts that it hit."""

    number: int
    injected: InjectedAttack
    recovered: Sequence[PartRecovery]
    traces: Mapping[str, str] = field(default_factory=dict)
    """The trace of the change that the attack caused, by job, where it is known."""


@dataclass(frozen=True)
class CampaignRecord:
    """Everything recorded in a campaign."""

    accepted: Sequence[str]
    """The jobs whose submission was accepted."""
    jobs: Sequence[JobView]
    """The accepted jobs, as they ended; all of the same script."""
    seen: Observations
    outcomes: Sequence[Outcome]
    undisturbed_sha256: str
    oversubscribed: Sequence[str] = ()
    """A description of each time that a host was seen with more workers than slots."""
    members: Mapping[str, Sequence[MemberCommit]] | None = None
    """What the members of each job committed by their own account; None: the script keeps none."""
    agent_logs: Mapping[str, str] = field(default_factory=dict)
    """The log of each host's agent."""
    models: Mapping[str, str] = field(default_factory=dict)
    """The sha256 of the stored model of each job that completed, computed from its file."""
    torn: Collection[tuple[str, int]] = ()
    """Jobs and iterations of checkpoints that were seen with a manifest and without all their parts."""
    skipped: Sequence[Skipped] = ()

    @property
    def stopped(self) -> frozenset[str]:
        """The jobs that were stopped on purpose."""
        attacks = (outcome.injected.attack for outcome in self.outcomes)
        return frozenset(attack.target.job for attack in attacks if attack.kind is AttackKind.STOP)

    def pauses(self, job: str) -> list[tuple[float, float]]:
        """Return when ``job`` was paused on purpose, and when it was resumed."""
        injected = (outcome.injected for outcome in self.outcomes)
        return [
            (i.since, i.until) for i in injected if i.attack.kind is AttackKind.PAUSE and i.attack.target.job == job
        ]


def faults(record: CampaignRecord) -> Iterator[str]:
    """Yield each broken promise, and that none was tested."""
    if not record.outcomes:
        yield "no attack was carried out: no promise was tested"
    known = {job.id: job for job in record.jobs}
    for name in record.accepted:
        if name not in record.stopped or name not in known or known[name].state is not JobState.STOPPED:
            yield from _end(name, known.get(name), record.undisturbed_sha256)
    yield from stored_models(record.jobs, record.models)
    yield from histories(record.jobs, record.seen.events)
    yield from slots_held_twice(record.seen.events)
    yield from record.oversubscribed
    yield from torn_checkpoints(record)
    for host, log in record.agent_logs.items():
        yield from slots_with_two_workers(host, log)
        yield from ended_by_signals(host, log)
    for job in record.jobs:
        yield from lineage(job)
        yield from starts_from_nothing(job, record.seen.checkpoints[job.id])
        yield from commits(job.id, record.seen.commits[job.id])
        yield from stands_still(job.id, record.seen.commits[job.id], record.pauses(job.id))
        yield from _members(job, record)
    yield from streams(record.seen.sequences)
    for outcome in record.outcomes:
        for part in outcome.recovered:
            if part.seconds is None:
                yield (
                    f"attack {outcome.number}, {outcome.injected.attack}: {part.what} had not recovered "
                    f"after {PATIENCE_SECONDS:.0f} s"
                )


def _end(name: str, job: JobView | None, sha256: str) -> Iterator[str]:
    if job is None:
        yield f"{name} was accepted, and is lost"
    elif job.state is not JobState.COMPLETED:
        yield f"{name} is {job.state.value} instead of completed: {job.reason}"
    else:
        if job.params_sha256 != sha256:
            yield f"{name} ended with {job.params_sha256}, an undisturbed run with {sha256}"
        if not job.ledger or not all(map(used_once, job.ledger)):
            wrong = [str(epoch.epoch) for epoch in job.ledger if not used_once(epoch)]
            yield f"{name} did not use every sample once, in epochs {', '.join(wrong) or '(none is counted)'}"


def _members(job: JobView, record: CampaignRecord) -> Iterator[str]:
    if record.members is None:
        return
    own = record.members.get(job.id, ())
    if not own and record.seen.commits[job.id]:
        yield f"{job.id} reported iterations that no member committed"
    injected = [outcome.injected for outcome in record.outcomes]
    yield from faults_of_members(
        job,
        own,
        checkpoints=record.seen.checkpoints[job.id],
        damaged=[i.damaged for i in injected if i.damaged is not None and i.attack.target.job == job.id],
        attacks=[(i.since, i.until) for i in injected],
    )


def stored_models(jobs: Iterable[JobView], models: Mapping[str, str]) -> Iterator[str]:
    """The model that is stored is the one that the completion names."""
    for job in jobs:
        if job.id in models and models[job.id] != job.params_sha256:
            yield f"the stored model of {job.id} has sha256 {models[job.id]}, its completion says {job.params_sha256}"


def torn_checkpoints(record: CampaignRecord) -> Iterator[str]:
    """A checkpoint exists whole or not at all, but for those that were damaged on purpose."""
    injected = [outcome.injected for outcome in record.outcomes]
    damaged = {(i.attack.target.job, i.damaged) for i in injected if i.damaged is not None}
    for job, iteration in sorted(set(record.torn) - damaged):
        yield f"{job}: the checkpoint of iteration {iteration} was seen with a manifest and without all its parts"


def stands_still(job: str, reported: Sequence[Commit], pauses: Sequence[tuple[float, float]]) -> Iterator[str]:
    """A job that is not paused gets further, not merely anywhere."""
    newest, since = 0, None
    for commit in sorted(reported, key=lambda commit: commit.time):
        if commit.iteration <= newest:
            continue
        if since is not None:
            paused = sum(max(0.0, min(end, commit.time) - max(begin, since)) for begin, end in pauses)
            if commit.time - since - paused > PATIENCE_SECONDS:
                yield f"{job} stood still at iteration {newest} for {commit.time - since - paused:.0f} s"
        newest, since = commit.iteration, commit.time


def histories(jobs: Iterable[JobView], events: Iterable[JobEvent]) -> Iterator[str]:
    """A history is numbered without a gap, and each of its items was published once, in order."""
    published: defaultdict[str, list[HistoryItem]] = defaultdict(list)
    for event in events:
        published[event.job].append(event.item)
    for job in jobs:
        numbers = [item.number for item in job.history]
        if numbers != list(range(1, len(numbers) + 1)):
            yield f"the history of {job.id} is numbered {numbers}"
        if published[job.id] != list(job.history):
            told = [item.number for item in published[job.id]]
            yield f"the history of {job.id} has {len(numbers)} items, its events have the numbers {told}"


def slots_held_twice(events: Iterable[JobEvent]) -> Iterator[str]:
    """At every moment every slot is held by one job at most."""
    holds: dict[str, tuple[str, ...]] = {}
    for event in sorted(events, key=lambda event: event.item.time):
        if event.item.kind == "allocation":
            holds[event.job] = event.item.slots
        elif event.item.kind in HOLDS_NOTHING:
            holds.pop(event.job, None)
        num_holders = Counter(slot for slots in holds.values() for slot in slots)
        for slot in (slot for slot, num in num_holders.items() if num > 1):
            names = ", ".join(job for job, slots in holds.items() if slot in slots)
            yield f"{slot} is held by {names} after item {event.item.number} of {event.job}"


def oversubscribed(workers: Sequence[RunningWorker], slots: Mapping[str, int]) -> Iterator[str]:
    """No host has more processes of workers than it has slots."""
    for host, number in Counter(worker.host for worker in workers).items():
        if number > slots[host]:
            names = ", ".join(f"{w.job}/{w.number} (process {w.pid})" for w in workers if w.host == host)
            yield f"{host} has {slots[host]} slots, and was seen with the workers {names}"


def lineage(job: JobView) -> Iterator[str]:
    """Generations only rise, and iterations too, but where the job starts again from what is stored."""
    life: list[HistoryItem] = []
    generation = 0
    for item in job.history:
        if item.kind == "allocation":
            if item.generation <= generation:
                yield f"{job.id}: generation {item.generation} took effect after {generation}"
            generation = item.generation
            life.append(item)
        elif item.kind in HOLDS_NOTHING:
            yield from _falls(job.id, life)
            life = []
    yield from _falls(job.id, life)


def starts_from_nothing(job: JobView, checkpoints: Sequence[Saved]) -> Iterator[str]:
    """A job that has a complete checkpoint never starts from the beginning again."""
    begins_anew = False
    released = 0.0
    for item in job.history:
        if item.kind in HOLDS_NOTHING:
            begins_anew, released = True, item.time.timestamp()
        elif item.kind == "allocation" and begins_anew:
            saved = max((saved.iteration for saved in checkpoints if saved.time <= released), default=0)
            if saved and not item.iteration:
                yield (
                    f"{job.id}: generation {item.generation} started from the beginning, beside a complete checkpoint "
                    f"of iteration {saved}"
                )
            begins_anew = False


def _falls(job: str, life: Sequence[HistoryItem]) -> Iterator[str]:
    for early, late in pairwise(life):
        if late.iteration < early.iteration:
            yield (
                f"{job}: generation {late.generation} began at iteration {late.iteration}, "
                f"{early.generation} before it at {early.iteration}"
            )


def commits(job: str, reported: Iterable[Commit]) -> Iterator[str]:
    """An iteration that is reported twice, since it had to be trained again, was the same both times."""
    known: dict[int, Commit] = {}
    for commit in reported:
        before = known.setdefault(commit.iteration, commit)
        if (before.loss, before.samples_seen) != (commit.loss, commit.samples_seen):
            yield (
                f"{job}: iteration {commit.iteration} has loss {before.loss} and {before.samples_seen} samples in "
                f"generation {before.generation}, loss {commit.loss} and {commit.samples_seen} in {commit.generation}"
            )


def streams(sequences: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Readers saw each message once, in order; of the whole pool also without a gap."""
    for name, numbers in sequences.items():
        for early, late in pairwise(numbers):
            if late <= early:
                yield f"the events of {name} came out of order or twice: {late} after {early}"
            elif name == "pool" and late != early + 1:
                yield f"the events of the pool have a gap between {early} and {late}"


def stored_sha256(file: Path) -> str:
    """Return the sha256 of the tensors of a safetensors file. Raises ValueError if it is not one."""
    with file.open("rb") as model:
        header = json.loads(model.read(int.from_bytes(model.read(8), "little")))
        data = model.tell()
        header.pop("__metadata__", None)
        sha = hashlib.sha256()
        for name in sorted(header):
            tensor = header[name]
            shape = ",".join(map(str, tensor["shape"]))
            sha.update(f"{name}\0{_DTYPES[tensor['dtype']]}\0{shape}\0".encode())
            begin, end = tensor["data_offsets"]
            model.seek(data + begin)
            sha.update(model.read(end - begin))
    return sha.hexdigest()
