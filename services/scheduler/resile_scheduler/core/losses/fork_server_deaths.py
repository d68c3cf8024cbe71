"""Which job is blamed for fork servers that die while their agents live.

A worker runs its job's script as the user of its host, so it can kill the fork server that started it, and every other
worker of the host with it. Nothing shows who did it, and memory or an operator may have. So each death counts against
all jobs that had workers there. At the third in an hour the job that was there most often fails, the newest of them if
several were there as often: the deaths began with it. The others are cleared.
"""

from resile_shared.messages.hosts import Heartbeat
from resile_shared.messages.message import at

from ..job_ends import JobEnds
from ..state.job import Job
from ..state.pool import Host, Pool

MAX_DEATHS = 3
FORGET_SECONDS = 3600.0
REASON = (
    "three times the process that starts workers was killed while workers of this job ran: "
    "make sure that the script ends no process that it did not start"
)


class ForkServerDeaths:
    """Counts the deaths of fork servers against jobs."""

    def __init__(self, pool: Pool, ends: JobEnds) -> None:
        self._pool = pool
        self._ends = ends

    def on_heartbeat(self, host: Host, beat: Heartbeat, *, now: float) -> None:
        """Count the death that ``beat`` reports, if it is the first heartbeat of its incarnation that does."""
        orphaned = [report for report in beat.workers if report.exit and report.exit.kind == "orphaned"]
        if not orphaned or host.has_lost_fork_server:
            return
        host.has_lost_fork_server = True
        names = dict.fromkeys(r.job for r in beat.workers if r.state != "gone" or r in orphaned)
        suspects = [job for name in names if (job := self._pool.jobs.get(name)) and not job.is_over]
        for job in suspects:
            _count(job, now)
        culprit = max(suspects, key=lambda job: (job.record.failures.fork_server_deaths, job.number), default=None)
        if culprit is None or culprit.record.failures.fork_server_deaths < MAX_DEATHS:
            return
        for job in suspects:
            job.count_failures(fork_server_deaths=0, fork_server_died=None)
        self._ends.fail(culprit, REASON, now=now)


def _count(job: Job, now: float) -> None:
    known = job.record.failures
    is_recent = known.fork_server_died is not None and now - known.fork_server_died.timestamp() < FORGET_SECONDS
    deaths = known.fork_server_deaths if is_recent else 0
    job.count_failures(fork_server_deaths=deaths + 1, fork_server_died=at(now))
