"""What happens to jobs before processes are stopped: all jobs of a pool are suspended, those of one host leave it.

The pool keeps running and is asked again until nothing is left to be saved, so a service that restarts just then costs
time and nothing else.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from resile_shared.bus.client import Bus
from resile_shared.bus.credentials import read_credentials
from resile_shared.bus.subjects import LEASE, LEASE_KEY, command
from resile_shared.errors import ResileError
from resile_shared.messages.commands import Accepted, PoolSuspend

from ..client import AsyncClient
from ..http_requests import Server

_POLL_SECONDS = 0.25
_ANSWER_SECONDS = 10.0
_MAX_NAMES = 10

Log = Callable[[str], None]
Suspend = Callable[[AsyncClient], Awaitable[tuple[str, ...]]]
"""Asks to suspend jobs; returns those that still hold slots. Raises ResileError."""


async def save_jobs(server: Server, *, seconds: float, log: Log, suspend: Suspend = AsyncClient.suspend_all) -> str:
    """Suspend all jobs of a pool; return what could not be saved within ``seconds``, empty if all is well."""
    left = await _repeat(server, suspend, seconds=seconds, log=lambda names: log(f"saving {names}"))
    if not left:
        return ""
    return (
        f"not saved within {seconds:g} s: {left}: the next `resile up` in this home continues from the last checkpoint"
    )


async def suspend_over_bus(credentials: Path) -> tuple[str, ...]:
    """Suspend all jobs without the API; return those that still hold slots. Raises ResileError."""
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            bus = await Bus.open(read_credentials(credentials), service="up")
            try:
                return await _suspend(bus)
            finally:
                await bus.close()
    except TimeoutError:
        raise ResileError("the monitor is not running, and the bus or the scheduler does not answer") from None


async def _suspend(bus: Bus) -> tuple[str, ...]:
    lease = await bus.bucket(LEASE).get(LEASE_KEY)
    if lease is None:
        raise ResileError("no scheduler has ever led this pool")
    answer = await bus.ask(command("pool", "suspend"), PoolSuspend(epoch=lease.value.epoch))
    if not isinstance(answer, Accepted):
        raise ResileError(answer.reason)
    return answer.jobs


async def drain_host(server: Server, name: str, *, seconds: float, has_workers: Callable[[], bool], log: Log) -> str:
    """Drain one host: its jobs go on elsewhere, or are suspended; return which did not leave within ``seconds``.

    A pool that does not answer is waited for only while ``has_workers`` says that workers run here.
    """

    async def drain(client: AsyncClient) -> tuple[str, ...]:
        try:
            await client.drain(name)
            return await _jobs_on(client, name)
        except ResileError as error:
            if has_workers():
                raise
            log(f"{name} was not drained, but no job runs on it: {error}")
            return ()

    left = await _repeat(server, drain, seconds=seconds, log=lambda names: log(f"{names} leaving {name}"))
    return left and f"did not leave {name} within {seconds:g} s: {left}: the pool continues without its workers"


async def _repeat(server: Server, ask: Suspend, *, seconds: float, log: Log) -> str:
    """Ask until no job is left to wait for; return which are left after ``seconds``, and why if that is known."""
    waiting: tuple[str, ...] = ()
    fault = ""
    try:
        async with asyncio.timeout(seconds), AsyncClient(server) as client:
            while True:
                try:
                    jobs = await ask(client)
                except ResileError as error:
                    fault = f": {error}"
                else:
                    if not jobs:
                        return ""
                    if jobs != waiting:
                        log(_names(jobs))
                    waiting, fault = jobs, ""
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        return f"{_names(waiting) if waiting else 'what was training'}{fault}"


async def _jobs_on(client: AsyncClient, name: str) -> tuple[str, ...]:
    slots = (slot for host in await client.hosts() if host.id == name for slot in host.slots)
    return tuple(sorted({slot.job for slot in slots if slot.job}))


def _names(jobs: Sequence[str]) -> str:
    more = len(jobs) - _MAX_NAMES
    number = f"{len(jobs)} job" + "s" * (len(jobs) > 1)
    return f"{number} ({', '.join(jobs[:_MAX_NAMES])}{f' and {more} more' if more > 0 else ''})"
