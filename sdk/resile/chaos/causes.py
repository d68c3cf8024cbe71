"""Finds the changes that an attack caused, and adds the attack to them as a step, so that their traces begin with it.

An attack comes from outside the pool and cannot pass a trace id to its victims. So its changes are found afterwards, by
the jobs and workers that it hit and by the time.
"""

import asyncio
import time
from collections.abc import Sequence

from resile_shared.errors import ResileError
from resile_shared.http.api import ChangeView, NewAttack, TraceSpan

from ..client import AsyncClient
from .observation import Observations
from .recovery_watch import InjectedAttack

CLOCK_SECONDS = 0.5
"""The first effect of an attack may be recorded up to this many seconds before the attack itself."""
KEPT_SECONDS = 30.0
"""The longest time that services take to send their steps and to publish history items, on a busy machine."""
EVENT_SECONDS = 2.0
"""The history item of a recovery may arrive up to this many seconds after the recovery."""
_POLL_SECONDS = 0.2


def is_effect(change: ChangeView, spans: Sequence[TraceSpan], injected: InjectedAttack, *, job: str) -> bool:
    """Whether the attack caused this change of ``job``, judged by the workers that the change names as lost."""
    if change.kind != "recovery" or change.time.timestamp() < injected.since - CLOCK_SECONDS:
        return False
    victims = injected.workers.get(job, frozenset())
    named = {
        span.attributes[f"resile.{name}"]
        for span in spans
        for name in _NAMING.get(span.name, ())
        if span.attributes.get("resile.job") == job and f"resile.{name}" in span.attributes
    }
    return bool(victims & named) if named else bool(victims)


_NAMING = {"worker suspected": ("suspect",), "worker is gone": ("worker",), "recover": ("suspect",)}
"""The steps that name a lost worker, and the attribute that does so."""


async def report_effects(
    client: AsyncClient, injected: InjectedAttack, seen: Observations, *, patience: float = KEPT_SECONDS
) -> dict[str, str]:
    """Add the attack to the changes that it caused; return the trace of each, by job.

    If a monitor does not answer or no longer has the steps, they stay without the attack: they are only for display.
    """
    begun, found = time.monotonic(), dict[str, str]()
    while awaited := [job for job in injected.workers if job not in found]:
        missing = [job for job in awaited if _has_changed(job, injected, seen)]
        if not missing and time.monotonic() - begun > EVENT_SECONDS:
            break
        for job in missing:
            try:
                if trace := await _report(client, injected, job):
                    found[job] = trace
            except ResileError:
                continue
        if time.monotonic() - begun > patience:
            break
        await asyncio.sleep(_POLL_SECONDS)
    return found


def _has_changed(job: str, injected: InjectedAttack, seen: Observations) -> bool:
    return any(
        event.job == job
        and event.item.kind in ("allocation", "queued")
        and event.item.time.timestamp() > injected.since - CLOCK_SECONDS
        for event in seen.events
    )


async def _report(client: AsyncClient, injected: InjectedAttack, job: str) -> str:
    """Add the attack to the first change of ``job`` that it caused; return its trace, empty if there is none yet."""
    for change in await client.changes(job):
        if change.trace is None or not change.has_spans:
            continue
        if change.time.timestamp() < injected.since - CLOCK_SECONDS:
            continue
        if is_effect(change, (await client.trace(change.trace)).spans, injected, job=job):
            seconds = max(0.0, injected.until - injected.since)
            attack = NewAttack(attack=str(injected.attack), job=job, begin=injected.since, seconds=seconds)
            await client.add_attack(change.trace, attack)
            return change.trace
    return ""
