"""When a pool has recovered from an attack, from its reports and by probing it.

A job has recovered when a generation without the victims commits an iteration, or any generation does after the attack.
A host has recovered when it is up, with a higher incarnation if its agent was killed; a service, when it is ready and
has done something that only it can do.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from resile_shared.bus.credentials import read_credentials
from resile_shared.errors import ResileError
from resile_shared.http.api import HostView
from resile_shared.messages.hosts import HostState

from ..client import AsyncClient
from ..http_requests import Refused
from .attacks import SERVICES, Attack, AttackKind, TargetKind
from .observation import Observations, Observer
from .processes import PoolProcesses

PATIENCE_SECONDS = 120.0
_POLL_SECONDS = 0.05
_ASK_SECONDS = 1.0


@dataclass(frozen=True)
class InjectedAttack:
    """An attack that was carried out, from ``since`` to ``until``, in seconds since the epoch."""

    attack: Attack
    since: float
    until: float
    processes: tuple[int, ...] = ()
    workers: dict[str, frozenset[int]] = field(default_factory=dict)
    """The workers that were hit, by job."""
    incarnation: int = 0
    """The incarnation of the host that was hit."""
    detail: str = ""
    damaged: int | None = None
    """The iteration of the checkpoint that was damaged."""
    effects: dict[str, float | None] = field(default_factory=dict)
    """Seconds until a request had its effect; None: it had none."""


@dataclass(frozen=True)
class PartRecovery:
    """Seconds until ``what`` (a job, a host, a service) had recovered; None: it did not."""

    what: str
    seconds: float | None


def job_recovery_time(
    seen: Observations, job: str, victims: frozenset[int], *, since: float, until: float
) -> float | None:
    """Return when ``job`` first committed an iteration without ``victims`` after ``since``, or at all after ``until``.

    A job that has completed or was stopped counts as recovered. That it goes on from there is for the verdict to see.
    """
    times = [
        commit.time
        for commit in seen.commits[job]
        if commit.time > since
        and (commit.time > until > since or _is_without(seen.members.get((job, commit.generation)), victims))
    ]
    times += [max(since, end) for end in seen.over(job)]
    return min(times, default=None)


def checkpoint_recovery_time(seen: Observations, job: str, *, until: float) -> float | None:
    """Return when ``job`` first had a complete checkpoint after ``until``; the end of the job counts, too."""
    times = [saved.time for saved in seen.checkpoints[job] if saved.time > until]
    times += [max(until, end) for end in seen.over(job)]
    return min(times, default=None)


def _is_without(members: frozenset[int] | None, victims: frozenset[int]) -> bool:
    return members is not None and not members & victims


def is_host_recovered(host: HostView, injected: InjectedAttack) -> bool:
    """Whether a host that was hit is up again."""
    needed = injected.incarnation + injected.attack.kind.kills
    return host.state is HostState.UP and host.incarnation >= needed


class RecoveryWatcher:
    """Waits for the pool in ``home`` to recover."""

    def __init__(self, home: Path, client: AsyncClient, observer: Observer, processes: PoolProcesses) -> None:
        self._home = home
        self._client = client
        self._observer = observer
        self._processes = processes

    async def wait(self, injected: InjectedAttack) -> list[PartRecovery]:
        """Wait until each part that was hit has recovered, and the attack is over; return the recovery times."""
        found = await asyncio.gather(*(self._wait(*part, injected) for part in self._parts(injected)))
        await asyncio.sleep(max(0.0, injected.until - time.time()))
        return [*(PartRecovery(*effect) for effect in injected.effects.items()), *found]

    def _parts(self, injected: InjectedAttack) -> Iterator[tuple[str, float, Callable[[], Awaitable[float | None]]]]:
        """Yield each part that must recover, the start of its recovery time, and a function that finds the end."""
        attack = injected.attack
        hinders = attack.kind in (AttackKind.SLOW, AttackKind.SLOW_LINK, AttackKind.DISK_FULL, AttackKind.UNMOUNT)
        start = injected.until if hinders else injected.since
        for job in injected.workers:
            yield job, start, lambda job=job: self._job(job, injected)  # type: ignore[misc]
        if attack.target.what.is_of_host:
            yield attack.target.name, injected.until, lambda: self._host(injected)
        if attack.target.what.is_service:
            yield attack.target.what.value, injected.until, lambda: self._service(injected)
        if attack.target.what is TargetKind.OBJECT_STORE and attack.target.name:
            yield f"checkpoint of {attack.target.name}", injected.until, lambda: self._checkpoint(injected)

    async def _wait(
        self, what: str, start: float, look: Callable[[], Awaitable[float | None]], injected: InjectedAttack
    ) -> PartRecovery:
        deadline = injected.until + PATIENCE_SECONDS
        while time.time() < deadline:
            try:
                async with asyncio.timeout(max(_ASK_SECONDS, deadline - time.time())):
                    if (when := await look()) is not None:
                        return PartRecovery(what, max(0.0, when - start))
            except (ResileError, TimeoutError):
                pass  # the pool has not recovered yet
            await asyncio.sleep(_POLL_SECONDS)
        return PartRecovery(what, None)

    async def _job(self, job: str, injected: InjectedAttack) -> float | None:
        since = injected.until if injected.attack.kind.is_request else injected.since
        return job_recovery_time(self._observer.seen, job, injected.workers[job], since=since, until=injected.until)

    async def _checkpoint(self, injected: InjectedAttack) -> float | None:
        return checkpoint_recovery_time(self._observer.seen, injected.attack.target.name, until=injected.until)

    async def _host(self, injected: InjectedAttack) -> float | None:
        if time.time() < injected.until:
            return None
        for host in await self._client.hosts():
            if host.id == injected.attack.target.name and is_host_recovered(host, injected):
                return max(host.since.timestamp(), injected.until)
        return None

    async def _service(self, injected: InjectedAttack) -> float | None:
        what = injected.attack.target.what
        pid = self._processes.pid(what)
        if time.time() < injected.until or pid is None:
            return None
        if injected.attack.kind.kills and pid in injected.processes:
            return None
        needing = SERVICES[:-1] if what is TargetKind.BUS else (what,)
        if what is TargetKind.BUS and not await self._bus_listens():
            return None
        if not all([await self._is_ready(service.value) for service in needing]):
            return None
        ready = time.time()
        while not await self._does_its_work(what, ready):  # noqa: ASYNC110 - what other processes do sets no event
            await asyncio.sleep(_POLL_SECONDS)
        return time.time()

    async def _does_its_work(self, what: TargetKind, ready: float) -> bool:
        """Ask for what only this service can do."""
        jobs = await self._client.jobs()
        living = [job for job in jobs if not job.state.is_final]
        if what is TargetKind.SCHEDULER and living:
            try:
                await self._client.set_priority(living[0].id, living[0].priority)
            except Refused as error:
                return error.status == 409
        if what is TargetKind.BUS and (working := [job for job in living if job.workers]):
            newest = (self._observer.seen.commits[job.id][-1:] for job in working)
            return any(commit.time > ready for commits in newest for commit in commits)
        return True

    async def _is_ready(self, service: str) -> bool:
        try:
            url = (self._home / "health" / service).read_text()
            timeout = aiohttp.ClientTimeout(_ASK_SECONDS)
            async with aiohttp.ClientSession(timeout=timeout) as http, http.get(f"{url}/readyz") as answer:
                return answer.status == 200
        except (OSError, aiohttp.ClientError, TimeoutError):
            return False

    async def _bus_listens(self) -> bool:
        address = read_credentials(self._home / "bus" / "credentials" / "monitor.json").url
        host, _, port = address.removeprefix("nats://").rpartition(":")
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                reader, writer = await asyncio.open_connection(host, int(port))
                greeting = await reader.readline()
                writer.close()
        except (OSError, TimeoutError):
            return False
        return greeting.startswith(b"INFO")
