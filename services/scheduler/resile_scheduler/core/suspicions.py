"""Which workers are to be left behind though nobody has seen them die.

A worker names a suspect, and says so again and again while it waits. That is an accusation, not a death:

- The agent of the suspect's host is asked at once. Its answer, a heartbeat, says whether the suspect is gone.
- If it does not answer, all workers of the job on that host are lost to the job; their slots stay held until the
  host is lost or its agent says that they are gone.
- If it answers and the suspect lives, a broken link alone is not enough, unless suspect and accuser accuse each other,
  or the accusation lasts. Silence is enough, but others get a moment to say what they hear. Then those are left behind
  who are accused and accuse nobody, as they are frozen or stuck, and of the others the largest set of members goes on
  of whom nobody accuses another. The job keeps off the hosts of those whom a cut left behind, for a while.
- Who was told by another member that it lost the suspect accuses too. That is a reason to ask, and no more.
"""

from collections import Counter
from collections.abc import Iterable, Set

from resile_shared.messages.reports import PeerSuspected, Report

from .events import ProbeExpired, ProbeHost
from .state import Accusation, Job, Pair, Phase, Pool, Worker

ASK_AGAIN_SECONDS = 0.5
ANSWER_SECONDS = 0.05
HEARINGS_PER_DETECTION = 15  # in one, all who hear nothing of a suspect notice that


class SuspicionTracker:
    """Weighs accusations."""

    def __init__(self, pool: Pool, *, detection_seconds: float) -> None:
        self._pool = pool
        self._detection_seconds = detection_seconds
        self._hearing_seconds = detection_seconds / HEARINGS_PER_DETECTION
        self._asked: list[ProbeHost] = []
        self._asked_at: dict[tuple[str, float], float] = {}

    def take_probes(self) -> list[ProbeHost]:
        """Return, once, whom to ask."""
        asked, self._asked = self._asked, []
        return asked

    def accuse(self, job: Job, report: Report, lost: PeerSuspected, *, now: float) -> None:
        """Take in the word of ``report.worker`` against ``lost.suspect``."""
        accuser, suspect = job.workers.get(report.worker), job.workers.get(lost.suspect)
        if accuser is None or not accuser.is_sound or accuser.number == lost.suspect:
            return
        if not job.has_started or job.record.completed or (suspect and (suspect.has_failed or suspect.is_fenced)):
            return
        pair = (accuser.number, lost.suspect)
        standing = job.accusations.get(pair)
        if standing is None or now - standing.latest >= self._detection_seconds:
            standing = job.accusations[pair] = Accusation(now)
        standing.latest = max(standing.latest, now)
        standing.evidence = lost.evidence
        if standing.latest - standing.since >= self._detection_seconds:
            self._cut(job, now=now)
        elif suspect is not None and suspect.phase < Phase.GONE:
            self._ask(suspect, seconds=self._hearing_seconds if lost.evidence == "silence" else ANSWER_SECONDS, now=now)

    def _ask(self, suspect: Worker, *, seconds: float, now: float) -> None:
        host = suspect.slot.host
        if host in self._pool.hosts and now - self._asked_at.get((host, seconds), float("-inf")) >= ASK_AGAIN_SECONDS:
            self._asked_at[host, seconds] = now
            self._asked.append(ProbeHost(host, suspect.incarnation, self._pool.hosts[host].beat, seconds))

    def unanswered(self, challenge: ProbeExpired, *, now: float) -> None:
        """The time for an answer has passed: see whether there was one."""
        host = self._pool.hosts.get(challenge.host)
        if host is None or host.record.incarnation != challenge.incarnation:
            return
        is_silent = host.beat <= challenge.beat
        for job in list(self._pool.jobs.values()):
            accused = {suspect for _, suspect in job.accusations}
            here = [worker for worker in job.workers.values() if worker.slot.host == challenge.host]
            if not accused & {worker.number for worker in here}:
                continue
            if is_silent:
                job.back_off(challenge.host, now=now)
                self._leave_behind(job, ((worker, f"{challenge.host} does not answer") for worker in here))
            elif any(_is_enough(job, pair) for pair in job.accusations):
                self._cut(job, now=now)

    def _cut(self, job: Job, *, now: float) -> None:
        """Leave behind those who are mute, and those whom the largest set that nobody divides does not need."""
        fresh = {
            pair
            for pair, word in job.accusations.items()
            if now - word.latest < self._detection_seconds and word.evidence != "hearsay"
        }
        accusers, suspects = ({pair[side] for pair in fresh} for side in (0, 1))
        mute = suspects - accusers
        living = frozenset(n for n in accusers if (w := job.workers.get(n)) and w.phase is Phase.MEMBER)
        cut_off = accusers - largest_connected_set(living, fresh)
        for worker in (job.workers[number] for number in cut_off if number in job.workers):
            job.back_off(worker.slot.host, now=now)
        behind = mute | cut_off
        if unknown := behind - job.workers.keys():
            job.vanished = f"worker {min(unknown)} is gone without a word"
        is_silent = any(word.evidence == "silence" for word in job.accusations.values())
        how = "is silent" if is_silent else "did not take part"
        workers = [job.workers[number] for number in sorted(behind - unknown)]
        self._leave_behind(job, ((w, f"worker {w.number} on {w.slot.name} {how}, say its peers") for w in workers))

    def _leave_behind(self, job: Job, reasons: Iterable[tuple[Worker, str]]) -> None:
        for worker, reason in reasons:
            if not worker.has_failed:
                worker.failure, worker.reason, worker.is_lost = "abandoned", reason, True
        job.accusations.clear()
        self._pool.changed()


def _is_enough(job: Job, pair: Pair) -> bool:
    """Whether what ``pair`` says leaves one of the two behind, though the suspect's agent answers."""
    accuser, suspect = pair
    return job.accusations[pair].evidence == "silence" or (suspect, accuser) in job.accusations


def largest_connected_set(workers: frozenset[int], divided: Set[Pair]) -> frozenset[int]:
    """Return the largest subset of ``workers`` that holds no pair of ``divided``; of equals the one of lowest ids."""
    within = {pair for pair in divided if workers.issuperset(pair)}
    if not within:
        return workers
    count = Counter(number for pair in within for number in pair)
    worst = min(count, key=lambda number: (-count[number], -number))
    opposite = {number for pair in within if worst in pair for number in pair} - {worst}
    return min(
        largest_connected_set(workers - {worst}, within),
        largest_connected_set(workers - opposite, within),
        key=lambda kept: (-len(kept), sorted(kept)),
    )
