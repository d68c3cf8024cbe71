"""Requests that a user could make at a bad moment: pause and resume, stop, drain, another priority.

Each must have its effect, whatever else is attacked meanwhile.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from resile_shared.errors import ResileError
from resile_shared.messages.jobs import JobState

from ..client import AsyncClient
from .attacks import Attack, AttackKind
from .injector import AttackInjector
from .recovery_watch import PATIENCE_SECONDS, InjectedAttack

_POLL_SECONDS = 0.1


class Requests:
    """Makes requests to the pool that ``injector`` attacks."""

    def __init__(self, client: AsyncClient, injector: AttackInjector) -> None:
        self._client = client
        self._injector = injector

    @asynccontextmanager
    async def inject(self, attack: Attack) -> AsyncIterator[InjectedAttack]:
        """Make the request, wait for its effect, and undo it where it can be. Raises ResileError if it is refused."""
        since = time.time()
        match attack.kind:
            case AttackKind.PAUSE:
                effect = await self._pause(attack)
            case AttackKind.STOP:
                effect = await self._stop(attack)
            case AttackKind.DRAIN:
                effect = await self._drain(attack)
            case _:
                effect = await self._set_priority(attack)
        incarnation = self._injector.incarnation(attack.target.name) if attack.target.what.is_of_host else 0
        if attack.kind is AttackKind.DRAIN:
            await self._return(attack.target.name)
        goes_on = attack.kind in (AttackKind.PAUSE, AttackKind.PRIORITY)
        yield InjectedAttack(
            attack,
            since=since,
            until=time.time(),
            workers={attack.target.job: frozenset()} if goes_on else {},
            incarnation=incarnation,
            effects={f"{attack.kind} {attack.target.name}": effect},
        )

    async def _pause(self, attack: Attack) -> float | None:
        job = attack.target.job
        await self._client.pause(job)
        try:
            effect = await self._until(lambda: self._is_in(job, JobState.PAUSED))
            await asyncio.sleep(attack.seconds)
        finally:
            with contextlib.suppress(ResileError):  # it has completed meanwhile
                await self._client.resume(job)
        return effect

    async def _stop(self, attack: Attack) -> float | None:
        job = attack.target.job
        await self._client.stop(job, reason="chaos")

        async def has_stopped() -> bool:
            slots = [slot for host in await self._client.hosts() for slot in host.slots]
            return await self._is_in(job, JobState.STOPPED) and not any(slot.job == job for slot in slots)

        return await self._until(has_stopped)

    async def _drain(self, attack: Attack) -> float | None:
        await self._client.drain(attack.target.name)

        async def is_empty() -> bool:
            hosts = [host for host in await self._client.hosts() if host.id == attack.target.name]
            return not any(slot.job for host in hosts for slot in host.slots)

        effect = await self._until(is_empty)
        await asyncio.sleep(attack.seconds)
        return effect

    async def _return(self, host: str) -> None:
        """Have a drained host come back: it is undrained as soon as the pool answers."""

        async def is_asked() -> bool:
            await self._client.undrain(host)
            return True

        await self._until(is_asked)

    async def _set_priority(self, attack: Attack) -> float | None:
        job = attack.target.job
        await self._client.set_priority(job, attack.priority)

        async def is_set() -> bool:
            view = await self._client.job(job)
            was_set = any(
                item.kind == "priority" and item.reason.endswith(f" to {attack.priority}") for item in view.history
            )
            return was_set or view.priority == attack.priority

        return await self._until(is_set)

    async def _is_in(self, job: str, state: JobState) -> bool:
        view = await self._client.job(job)
        return view.state is state or view.state.is_final

    async def _until(self, condition: Callable[[], Awaitable[bool]]) -> float | None:
        """Wait; return after how many seconds the condition held, None: it did not."""
        begun = time.monotonic()
        while time.monotonic() - begun < PATIENCE_SECONDS:
            with contextlib.suppress(ResileError):  # the pool does not answer now
                if await condition():
                    return time.monotonic() - begun
            await asyncio.sleep(_POLL_SECONDS)
        return None
