"""When a pool has recovered from an attack: found in what it tells, and by asking it.

A job has when a generation without the victims, or anybody after the end of the attack, commits an iteration. A host
has when it is up again, with a higher incarnation if its agent was killed; a service when it is ready and does its
work.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from resile_shared.api import HostView
from resile_shared.credentials import read_credentials
from resile_shared.errors import ResileError
from resile_shared.messages.hosts import HostState

from ..client import Client, Refused
from .attacks import SERVICES, Attack, Kind, What
from .observation import Observations, Observer
from .processes import PoolProcesses

PATIENCE_SECONDS = 120.0
_LOOK_SECONDS = 0.05
_ASK_SECONDS = 1.0


@dataclass(frozen=True)
class Struck:
    """An attack that was carried out: from ``since`` to ``until``, in seconds since the epoch."""

    attack: Attack
    since: float
    until: float
    processes: tuple[int, ...] = ()
    workers: dict[str, frozenset[int]] = field(default_factory=dict)
    """The workers that were hit, by job."""
    incarnation: int = 0
    """Of the host that was hit."""
    detail: str = ""


@dataclass(frozen=True)
class Recovered:
    """After how many seconds ``what`` (a job, a host, a service) had recovered; None: that was not seen."""

    what: str
    seconds: float | None


def goes_on(seen: Observations, job: str, victims: frozenset[int], *, since: float, until: float) -> float | None:
    """Return when ``job`` first committed an iteration without ``victims`` after ``since``, or at all after ``until``.

    A job that has trained to its end needs nobody any more.
    """
    times = [
        commit.time
        for commit in seen.commits[job]
        if commit.time > since
        and (commit.time > until > since or _is_without(seen.members.get((job, commit.generation)), victims))
    ]
    if job in seen.completed:
        times.append(max(since, seen.completed[job]))
    return min(times, default=None)


def stores_again(seen: Observations, job: str, *, until: float) -> float | None:
    """Return when ``job`` first had a complete checkpoint after ``until``; one that has completed needs none."""
    times = [when for when in seen.checkpoints[job] if when > until]
    if job in seen.completed:
        times.append(max(until, seen.completed[job]))
    return min(times, default=None)


def _is_without(members: frozenset[int] | None, victims: frozenset[int]) -> bool:
    return members is not None and not members & victims


def is_back(host: HostView, struck: Struck) -> bool:
    """Whether a host that was hit is what it was before."""
    needed = struck.incarnation + (struck.attack.kind is Kind.KILL)
    return host.state is HostState.UP and host.incarnation >= needed


class Recovery:
    """Waits for the pool in ``home`` to recover."""

    def __init__(self, home: Path, client: Client, observer: Observer, processes: PoolProcesses) -> None:
        self._home = home
        self._client = client
        self._observer = observer
        self._processes = processes

    async def of(self, struck: Struck) -> list[Recovered]:
        """Return how long each part took that was hit; a lasting attack is over by then."""
        found = await asyncio.gather(*(self._wait(*part, struck) for part in self._parts(struck)))
        await asyncio.sleep(max(0.0, struck.until - time.time()))
        return found

    def _parts(self, struck: Struck) -> Iterator[tuple[str, float, Callable[[], Awaitable[float | None]]]]:
        """What has to recover, from when on its time counts, and how that is seen."""
        attack = struck.attack
        hinders = attack.kind in (Kind.SLOW, Kind.SLOW_LINK, Kind.DISK_FULL)
        start = struck.until if hinders else struck.since
        for job in struck.workers:
            yield job, start, lambda job=job: self._job(job, struck)  # type: ignore[misc]
        if attack.target.what.is_of_host:
            yield attack.target.name, struck.until, lambda: self._host(struck)
        if attack.target.what.is_service:
            yield attack.target.what.value, struck.until, lambda: self._service(struck)
        if attack.target.what is What.OBJECT_STORE and attack.target.name:
            yield f"checkpoint of {attack.target.name}", struck.until, lambda: self._checkpoint(struck)

    async def _wait(
        self, what: str, start: float, look: Callable[[], Awaitable[float | None]], struck: Struck
    ) -> Recovered:
        deadline = struck.until + PATIENCE_SECONDS
        while time.time() < deadline:
            try:
                async with asyncio.timeout(max(_ASK_SECONDS, deadline - time.time())):
                    if (when := await look()) is not None:
                        return Recovered(what, max(0.0, when - start))
            except (ResileError, TimeoutError):
                pass  # the pool does not answer, which is what is waited for
            await asyncio.sleep(_LOOK_SECONDS)
        return Recovered(what, None)

    async def _job(self, job: str, struck: Struck) -> float | None:
        return goes_on(self._observer.seen, job, struck.workers[job], since=struck.since, until=struck.until)

    async def _checkpoint(self, struck: Struck) -> float | None:
        return stores_again(self._observer.seen, struck.attack.target.name, until=struck.until)

    async def _host(self, struck: Struck) -> float | None:
        if time.time() < struck.until:
            return None
        for host in await self._client.hosts():
            if host.id == struck.attack.target.name and is_back(host, struck):
                return max(host.since.timestamp(), struck.until)
        return None

    async def _service(self, struck: Struck) -> float | None:
        what = struck.attack.target.what
        pid = self._processes.pid(what)
        if time.time() < struck.until or pid is None:
            return None
        if struck.attack.kind is Kind.KILL and pid in struck.processes:
            return None
        needing = SERVICES[:-1] if what is What.BUS else (what,)
        if what is What.BUS and not await self._bus_listens():
            return None
        if not all([await self._is_ready(service.value) for service in needing]):
            return None
        ready = time.time()
        while not await self._does_its_work(what, ready):  # noqa: ASYNC110 - what other processes do sets no event
            await asyncio.sleep(_LOOK_SECONDS)
        return time.time()

    async def _does_its_work(self, what: What, ready: float) -> bool:
        """Ask for what only this service can do."""
        jobs = await self._client.jobs()
        living = [job for job in jobs if not job.state.is_final]
        if what is What.SCHEDULER and living:
            try:
                await self._client.set_priority(living[0].id, living[0].priority)
            except Refused as error:
                return error.status == 409
        if what is What.BUS and (working := [job for job in living if job.workers]):
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
