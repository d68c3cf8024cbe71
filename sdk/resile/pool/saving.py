"""What happens to jobs before processes are stopped: all jobs of a pool are suspended, those of one host leave it.

The pool keeps running and is asked again until nothing is left to be saved, so a service that restarts just then costs
time and nothing else.
"""

import asyncio
from collections.abc import Callable, Sequence

from resile_shared.errors import ResileError

from ..client import Client, Server

_POLL_SECONDS = 0.25
_MAX_NAMES = 10

Log = Callable[[str], None]


async def save_jobs(server: Server, *, seconds: float, log: Log) -> str:
    """Suspend all jobs of a pool; return what could not be saved within ``seconds``, empty if all is well."""
    saving: tuple[str, ...] = ()
    fault = ""
    try:
        async with asyncio.timeout(seconds), Client(server) as client:
            while True:
                try:
                    jobs = await client.suspend_all()
                except ResileError as error:
                    fault = f": {error}"
                else:
                    if not jobs:
                        return ""
                    if jobs != saving:
                        log(f"saving {_names(jobs)}")
                    saving, fault = jobs, ""
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        what = _names(saving) if saving else "what was training"
        return (
            f"not saved within {seconds:g} s: {what}{fault}: the next `resile up` in this home continues from the last "
            "checkpoint"
        )


async def drain_host(server: Server, name: str, *, seconds: float, has_workers: Callable[[], bool], log: Log) -> str:
    """Drain one host: its jobs go on elsewhere, or are suspended; return which did not leave within ``seconds``.

    A pool that does not answer is waited for only while ``has_workers`` says that workers run here.
    """
    leaving: tuple[str, ...] = ()
    fault = ""
    try:
        async with asyncio.timeout(seconds), Client(server) as client:
            while True:
                try:
                    await client.drain(name)
                    jobs = await _jobs_on(client, name)
                except ResileError as error:
                    fault = f": {error}"
                    if not has_workers():
                        log(f"{name} was not drained, but no job runs on it{fault}")
                        return ""
                else:
                    if not jobs:
                        return ""
                    if jobs != leaving:
                        log(f"{_names(jobs)} leaving {name}")
                    leaving, fault = jobs, ""
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        what = _names(leaving) if leaving else "what was training"
        return f"did not leave {name} within {seconds:g} s: {what}{fault}: the pool continues without its workers"


async def _jobs_on(client: Client, name: str) -> tuple[str, ...]:
    slots = (slot for host in await client.hosts() if host.id == name for slot in host.slots)
    return tuple(sorted({slot.job for slot in slots if slot.job}))


def _names(jobs: Sequence[str]) -> str:
    more = len(jobs) - _MAX_NAMES
    number = f"{len(jobs)} job" + "s" * (len(jobs) > 1)
    return f"{number} ({', '.join(jobs[:_MAX_NAMES])}{f' and {more} more' if more > 0 else ''})"
