"""Asks the agents of suspects whether they are alive, and evicts the workers that are not.

- The agent of the suspect's host is probed at once. Its answer, a heartbeat, says whether the suspect is gone.
- If it does not answer, all workers of the job on that host are lost to the job; their slots stay held until the host
  is lost or its agent reports that they are gone.
- If it answers, the accusations decide (`suspicions.py`). The job avoids the hosts of the workers that were cut off.
- Before training has begun nobody is evicted. A member whose first round was abandoned takes part in no round of
  that generation any more, so a start in which it accuses another for a while is given up (`deadlines.py`).
- Once training is complete nobody is evicted. Members whose last round was abandoned wait for a recovery and say
  so again and again: they are ended, since the result is stored.
"""

from collections.abc import Iterable

from resile_shared.messages.reports import PeerSuspected, Report

from ..events import ProbeExpired, ProbeHost
from ..state.job import Job
from ..state.pool import Pool
from ..state.worker import Phase, Worker

PROBE_AGAIN_SECONDS = 0.5
ANSWER_SECONDS = 0.05
HEARINGS_PER_DETECTION = 15  # within one, all members that get nothing from a suspect notice it


class HostProber:
    """Handles accusations."""

    def __init__(self, pool: Pool, *, detection_seconds: float) -> None:
        self._pool = pool
        self._detection_seconds = detection_seconds
        self._hearing_seconds = detection_seconds / HEARINGS_PER_DETECTION
        self._probes: list[ProbeHost] = []
        self._probed_at: dict[tuple[str, float], float] = {}

    def forget(self, host: str) -> None:
        """Forget a host that is removed."""
        self._probed_at = {probe: time for probe, time in self._probed_at.items() if probe[0] != host}

    def take_probes(self) -> list[ProbeHost]:
        """Return, once, the hosts to be probed."""
        probes, self._probes = self._probes, []
        return probes

    def accuse(self, job: Job, report: Report, accusation: PeerSuspected, *, now: float) -> None:
        """Handle the accusation of ``accusation.suspect`` by ``report.worker``."""
        accuser, suspect = job.workers.get(report.worker), job.workers.get(accusation.suspect)
        if accuser is None or accuser.number == accusation.suspect:
            return
        pair = (accuser.number, accusation.suspect)
        if not job.generations.has_started:
            if accusation.evidence != "silence":
                job.suspicions.add(pair, accusation.evidence, now=now, seconds=self._detection_seconds)
            return
        if not accuser.is_sound:
            return
        if job.record.completed:
            self._end_waiting(job, accuser, accusation, now=now)
            return
        if suspect and (suspect.has_failed or suspect.is_fenced):
            return
        if job.suspicions.add(pair, accusation.evidence, now=now, seconds=self._detection_seconds):
            self._evict_suspects(job, now=now)
        elif suspect is not None and suspect.phase < Phase.GONE:
            is_silence = accusation.evidence == "silence"
            self._probe(suspect, seconds=self._hearing_seconds if is_silence else ANSWER_SECONDS, now=now)

    def _end_waiting(self, job: Job, accuser: Worker, accusation: PeerSuspected, *, now: float) -> None:
        """End a member that is waiting for a recovery though training is complete: those that are not accuse nobody."""
        pair = (accuser.number, accusation.suspect)
        if job.suspicions.add(pair, accusation.evidence, now=now, seconds=self._detection_seconds):
            accuser.fence()

    def _probe(self, suspect: Worker, *, seconds: float, now: float) -> None:
        host = suspect.slot.host
        last = self._probed_at.get((host, seconds), float("-inf"))
        if host in self._pool.hosts and now - last >= PROBE_AGAIN_SECONDS:
            self._probed_at[host, seconds] = now
            self._probes.append(ProbeHost(host, suspect.incarnation, self._pool.hosts[host].beat, seconds))

    def on_probe_expired(self, probe: ProbeExpired, *, now: float) -> None:
        """Handle that the host has answered by now, or has not."""
        host = self._pool.hosts.get(probe.host)
        if host is None or host.record.incarnation != probe.incarnation:
            return
        is_silent = host.beat <= probe.beat
        for job in list(self._pool.jobs.values()):
            if job.record.completed or not job.generations.has_started:
                continue
            here = [worker for worker in job.workers.values() if worker.slot.host == probe.host]
            if job.suspicions.suspects.isdisjoint(worker.number for worker in here):
                continue
            if is_silent:
                job.backoff.add(probe.host, now=now)
                for worker in here:
                    worker.lose_host()
                self._evict(job, ((worker, f"{probe.host} does not answer") for worker in here))
            elif job.suspicions.is_conclusive:
                self._evict_suspects(job, now=now)

    def _evict_suspects(self, job: Job, *, now: float) -> None:
        members = {worker.number for worker in job.workers.values() if worker.phase is Phase.MEMBER}
        verdict = job.suspicions.judge(members, now=now, seconds=self._detection_seconds)
        for number in verdict.cut_off & job.workers.keys():
            job.backoff.add(job.workers[number].slot.host, now=now)
        behind = verdict.mute | verdict.cut_off
        if unknown := behind - job.workers.keys():
            job.suspicions.record_vanished(f"worker {min(unknown)}")
        how = "is silent" if job.suspicions.has_silence else "did not take part"
        workers = [job.workers[number] for number in sorted(behind - unknown)]
        self._evict(job, ((w, f"worker {w.number} on {w.slot.name} {how}, according to its peers") for w in workers))

    def _evict(self, job: Job, reasons: Iterable[tuple[Worker, str]]) -> None:
        for worker, reason in reasons:
            worker.evict(reason)
        job.suspicions.drop_accusations()
        self._pool.changed(job)
