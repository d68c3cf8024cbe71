"""What the members of a job committed, by their own account, and which promises it shows to be broken. Pure.

The account is a file to which the attacked script appends a line for each iteration that a worker has committed
(`tests/chaos/scripts/attacked.py`). It passes through no agent, no bus and no scheduler, so it shows what was trained,
whatever their records say.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pydantic import BaseModel, ConfigDict

from resile_shared.http.api import JobView
from resile_shared.messages.jobs import HistoryItem

COMMITS_VARIABLE = "CHAOS_COMMITS"
"""Environment variable of a job: the file for its members' accounts."""
SETTLE_SECONDS = 30.0
"""How long a generation may go on training after it was superseded, and after each attack that may isolate it."""
HOLDS_NOTHING = frozenset({"queued", "paused", "completed", "stopped", "failed"})
"""Items of a history after which a job holds no slot."""


class MemberCommit(BaseModel):
    """One worker has committed ``iteration`` iterations, in ``generation``; ``params`` is a digest of its model."""

    model_config = ConfigDict(frozen=True)

    time: float
    job: str
    worker: int
    generation: int
    iteration: int
    params: str


@dataclass(frozen=True)
class Saved:
    """A checkpoint of ``iteration`` was reported complete; ``time`` is when the report was stored."""

    time: float
    iteration: int


@dataclass(frozen=True)
class Start:
    """The first iteration that a generation committed, and what was committed before."""

    generation: int
    time: float
    iteration: int
    before: Sequence[MemberCommit]
    lineage: Sequence[MemberCommit]
    """The commits in ``before`` by the generation's own lineage; empty: it starts from a checkpoint or from nothing."""
    has_survivor: bool
    """Whether a worker of this generation had committed an iteration before."""


def read_commits(text: str) -> dict[str, list[MemberCommit]]:
    """Parse the file; return the commits of each job in their order. Raises ValueError for a malformed line."""
    found: defaultdict[str, list[MemberCommit]] = defaultdict(list)
    for line in text.splitlines():
        commit = MemberCommit.model_validate_json(line)
        found[commit.job].append(commit)
    return {job: sorted(commits, key=lambda commit: commit.time) for job, commits in found.items()}


def faults_of_members(
    job: JobView,
    commits: Sequence[MemberCommit],
    *,
    checkpoints: Sequence[Saved],
    damaged: Iterable[int],
    attacks: Sequence[tuple[float, float]],
) -> Iterator[str]:
    """Yield each promise that the members of ``job`` broke.

    ``damaged`` are the iterations of the checkpoints that were damaged on purpose, ``attacks`` the beginnings and ends
    of all attacks.
    """
    starts = _starts(job, commits)
    yield from _same_bits(job.id, commits)
    yield from _each_member(job.id, commits)
    released = [item.time.timestamp() for item in job.history if item.kind in HOLDS_NOTHING]
    intact = [saved for saved in checkpoints if saved.iteration not in set(damaged)]
    for start in starts:
        yield from _continues(job.id, start, intact, released)
    yield from _superseded(job.id, commits, starts, attacks)
    yield from _recorded(job, commits, starts)


def _starts(job: JobView, commits: Sequence[MemberCommit]) -> list[Start]:
    starts: list[Start] = []
    lineage: set[int] = set()
    for generation in sorted({commit.generation for commit in commits}):
        own = [commit for commit in commits if commit.generation == generation]
        first, workers = own[0], {commit.worker for commit in own}
        before = [c for c in commits if c.generation < generation and c.time < first.time]
        has_survivor = any(commit.worker in workers for commit in before)
        if not (has_survivor or (starts and _has_taken_over(job, starts[-1].generation, generation))):
            lineage = set()
        of_lineage = [commit for commit in before if commit.generation in lineage]
        starts.append(Start(generation, first.time, first.iteration, before, of_lineage, has_survivor))
        lineage.add(generation)
    return starts


def _has_taken_over(job: JobView, early: int, late: int) -> bool:
    """Whether ``job`` moved from one generation to workers that are all new, and held slots meanwhile."""
    marks = [(i.kind, i.generation) for i in job.history if i.kind == "allocation" or i.kind in HOLDS_NOTHING]
    both = ("allocation", early), ("allocation", late)
    if not all(mark in marks for mark in both):
        return False
    between = marks[marks.index(both[0]) : marks.index(both[1])]
    return all(kind == "allocation" for kind, _ in between)


def _same_bits(job: str, commits: Sequence[MemberCommit]) -> Iterator[str]:
    """All members that committed an iteration, in whatever generation, had the same model after it."""
    known: dict[int, MemberCommit] = {}
    for commit in commits:
        other = known.setdefault(commit.iteration, commit)
        if other.params != commit.params:
            yield (
                f"{job}: after iteration {commit.iteration} worker {commit.worker} of generation {commit.generation} "
                f"has another model than worker {other.worker} of generation {other.generation}"
            )
            return


def _each_member(job: str, commits: Sequence[MemberCommit]) -> Iterator[str]:
    """A worker commits each iteration once, in order, and never follows an older generation."""
    by_worker: defaultdict[int, list[MemberCommit]] = defaultdict(list)
    for commit in commits:
        by_worker[commit.worker].append(commit)
    for worker, own in by_worker.items():
        for early, late in pairwise(own):
            if late.generation < early.generation:
                yield f"{job}: worker {worker} went back from generation {early.generation} to {late.generation}"
            if late.iteration <= early.iteration:
                yield f"{job}: worker {worker} committed iteration {late.iteration} after {early.iteration}"
            elif late.generation == early.generation and late.iteration != early.iteration + 1:
                yield (
                    f"{job}: worker {worker} committed iteration {late.iteration} after {early.iteration} "
                    f"in generation {late.generation}"
                )


def _continues(job: str, start: Start, intact: Sequence[Saved], released: Sequence[float]) -> Iterator[str]:
    """A generation continues behind the last iteration of its lineage, or it starts from the newest checkpoint.

    What members of other lineages have trained beyond that checkpoint is lost with them.
    """
    began = start.iteration - 1
    text = f"{job}: generation {start.generation} began at iteration {began}"
    newest = max((commit.iteration for commit in start.lineage or start.before), default=0)
    if began > newest:
        yield f"{text}, but only {newest} were committed before"
    elif start.lineage and began < newest - 1:  # a lost member alone may have committed the iteration in flight
        why = "a worker survived" if start.has_survivor else "it took over from others"
        yield f"{text} though {why}, and {newest} were committed before"
    elif start.before and not start.lineage:
        until = max((time for time in released if time < start.time), default=start.time)
        saved = max((saved.iteration for saved in intact if saved.time <= until), default=0)
        if began < min(saved, newest):
            yield f"{text}, beside a complete checkpoint of iteration {saved}"


def _superseded(
    job: str, commits: Sequence[MemberCommit], starts: Sequence[Start], attacks: Sequence[tuple[float, float]]
) -> Iterator[str]:
    """A generation ends when a newer one trains; one that is isolated may go on until it can learn of that."""
    for start, newer in pairwise(starts):
        after = min(later.time for later in starts if later.generation > start.generation)
        for commit in (c for c in commits if c.generation == start.generation and c.time > after):
            isolated = max((until for since, until in attacks if since < commit.time and until > after), default=after)
            if commit.time > max(after, isolated) + SETTLE_SECONDS:
                yield (
                    f"{job}: generation {start.generation} still trains {commit.time - after:.0f} s after generation "
                    f"{newer.generation} does"
                )
                break


def _recorded(job: JobView, commits: Sequence[MemberCommit], starts: Sequence[Start]) -> Iterator[str]:
    """The history says what the members did."""
    allocations: dict[int, HistoryItem] = {i.generation: i for i in job.history if i.kind == "allocation"}
    for start in starts:
        item = allocations.get(start.generation)
        own = [commit.time for commit in commits if commit.generation == start.generation]
        if item is not None and item.iteration != start.iteration - 1:
            yield (
                f"{job.id}: generation {start.generation} began at iteration {item.iteration} by its history, at "
                f"{start.iteration - 1} by its members"
            )
        if item is None and own[-1] - own[0] > SETTLE_SECONDS:
            yield f"{job.id}: generation {start.generation} trained {own[-1] - own[0]:.0f} s and is not in its history"
    trained = max((commit.iteration for commit in commits), default=0)
    if job.params_sha256 is not None and job.iteration != trained:
        yield f"{job.id} completed with iteration {job.iteration}, its members committed {trained}"
    missing = set(range(1, trained + 1)) - {commit.iteration for commit in commits}
    if missing:
        yield f"{job.id}: no member committed iteration {min(missing)}"
