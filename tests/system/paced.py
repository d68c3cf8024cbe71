"""Jobs that last until a test has seen what it waits for: fast up to an iteration that it sets, and slow from there."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resile.client import AsyncClient
from resile.package import pack
from resile_shared.http.api import HostView, JobView
from resile_shared.messages.jobs import JobSpec
from resile_testing.waiting import PATIENCE_SECONDS

SLOW_SECONDS = 0.5
LOOK_SECONDS = 0.1

CALLBACK = f"""
import pathlib, time
from resile.training import Callback

class Pace(Callback):
    def __init__(self, file):
        self.file = file and pathlib.Path(file)

    def on_iteration(self, loop, iteration):
        if self.file and iteration.number >= int(self.file.read_text()):
            time.sleep({SLOW_SECONDS})
"""
"""For scripts: ``callbacks=[Pace(file)]``, with the file of a `Pace`, or None for full speed."""


class Pace:
    """Up to which iteration a job is fast."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.fast_until(0)

    def fast_until(self, iteration: int) -> None:
        """Let the job hurry until it has committed so many iterations."""
        draft = self.file.with_suffix(".draft")
        draft.write_text(str(iteration))
        draft.replace(self.file)


async def submit(client: AsyncClient, script: Path, *args: object, name: str, **asked: Any) -> str:
    """Submit a script; return the job's id. ``asked`` is what a `JobSpec` may have besides."""
    package = pack(script)
    key = await client.upload(package.content)
    spec = JobSpec(name=name, package=key, script=package.script, args=tuple(map(str, args)), **asked)
    return await client.submit(spec)


async def becomes(
    client: AsyncClient, job: str, fits: Callable[[JobView], object], *, seconds: float = PATIENCE_SECONDS
) -> JobView:
    """Look until the job is as ``fits`` wants it; one that is over cannot become anything any more."""
    deadline = time.monotonic() + seconds
    while not fits(view := await client.job(job)):
        assert not view.state.is_final, view
        assert time.monotonic() < deadline, view
        await asyncio.sleep(LOOK_SECONDS)
    return view


async def host_becomes(client: AsyncClient, name: str, fits: Callable[[HostView], object]) -> HostView:
    """Look until the host is as ``fits`` wants it, which may not have joined yet."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        hosts = {host.id: host for host in await client.hosts()}
        if name in hosts and fits(hosts[name]):
            return hosts[name]
        assert time.monotonic() < deadline, hosts
        await asyncio.sleep(LOOK_SECONDS)
