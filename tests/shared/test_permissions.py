"""Each role can do its work, and nothing else: asked of the real server."""

import asyncio

import pytest

from resile_shared.bus import subjects
from resile_shared.bus.buckets import Bucket
from resile_shared.bus.connection import BusRefused
from resile_shared.bus.roles import ROLES
from resile_shared.messages.hosts import Heartbeat
from resile_shared.messages.pool import Lease
from resile_testing.fixtures import Pool
from resile_testing.waiting import PATIENCE_SECONDS, until

from .examples import hello, record

SUBJECTS = {
    "resile.host.h.hello": {"learner"},
    "resile.host.h.joined": {"registry"},
    "resile.heartbeat.h": {"learner"},
    "resile.instruction.h": {"scheduler"},
    "resile.job.j.running": {"scheduler"},
    "resile.report.j.progress": {"learner"},
    "resile.log.j": {"learner"},
    "resile.trace.learner": {"learner"},
    "resile.trace.scheduler": {"scheduler"},
    "resile.command.job.stop": {"monitor", "publisher"},
    "resile.command.job.priority": {"monitor", "publisher"},
    "resile.command.job.submit": {"monitor"},
    "resile.command.job.delete": {"monitor"},
    "resile.command.host.drain": {"monitor", "publisher"},
    "resile.command.host.undrain": {"monitor", "publisher"},
    "resile.command.pool.suspend": {"monitor"},
    "resile.command.tenant.set": {"monitor"},
    "resile.query.jobs.explain": {"monitor"},
    "resile.deadletter": set(ROLES) - {"publisher"},
    "$KV.jobs.j": {"scheduler"},
    "$KV.allocations.j": {"scheduler"},
    "$KV.lease.scheduler": {"scheduler"},
    "$KV.hosts.h": {"registry"},
    "$KV.webhooks.w": {"monitor"},
    "$KV.pool.settings": {"registry"},
    "$JS.API.STREAM.DELETE.events": set(),
    "$JS.API.STREAM.PURGE.KV_jobs": set(),
    "$JS.API.STREAM.PURGE.events": {"registry", "scheduler"},
    "$JS.API.STREAM.PURGE.reports": {"scheduler"},
    "$JS.API.STREAM.PURGE.progress": {"scheduler"},
    "$JS.API.STREAM.PURGE.logs": {"scheduler"},
    "$JS.API.STREAM.PURGE.deadletters": set(),
    "$JS.API.STREAM.MSG.DELETE.events": set(),
    "$JS.API.CONSUMER.DELETE.events.x": set(),
    "$JS.API.DIRECT.GET.KV_allocations.$KV.allocations.j": {"scheduler", "learner"},
    "$JS.API.DIRECT.GET.KV_jobs.$KV.jobs.j": {"scheduler", "learner", "monitor"},
    "$JS.API.CONSUMER.CREATE.logs.x": {"monitor"},
    "$JS.API.DIRECT.GET.logs": {"monitor"},
    "$JS.API.STREAM.CREATE.other": set(),
}
INBOX = "_INBOX_scheduler.x"
"""Where nobody may publish but to answer: it is not noted, since late answers are refused there, too."""


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_publishes_its_own_subjects_alone(pool: Pool, role: str) -> None:
    heard: list[object] = []

    async def hear(message: object) -> None:
        heard.append(message)

    scheduler, connection = (await pool.bus("scheduler")).connection, (await pool.bus(role)).connection
    await scheduler.subscribe(INBOX, hear)
    await scheduler.flush()
    for subject in (INBOX, *SUBJECTS):
        await connection.send(subject, b"", headers={})
    await connection.flush()
    denied = {subject.lower() for subject, roles in SUBJECTS.items() if role not in roles}
    await until(lambda: connection.denied >= denied)
    assert connection.denied == denied
    await scheduler.flush()
    assert not heard


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_hears_its_own_subjects_alone(pool: Pool, role: str) -> None:
    await pool.bus("scheduler")
    connection = (await pool.bus(role)).connection
    hears = {
        "resile.host.*.hello": {"registry", "scheduler", "monitor", "publisher"},
        "resile.heartbeat.*": {"registry", "scheduler", "monitor"},
        "resile.instruction.*": {"learner"},
        "resile.job.>": {"monitor", "publisher"},
        "resile.report.*.*": {"scheduler", "monitor"},
        "resile.log.*": {"monitor"},
        "resile.trace.*": {"monitor"},
        "resile.command.job.submit": {"scheduler"},
        "resile.command.host.drain": {"registry"},
        "resile.query.jobs.explain": {"scheduler"},
        "resile.deadletter": {"monitor"},
        "$KV.>": set(),
        "_INBOX.>": set(),
        ">": set(),
        **{f"_INBOX_{other}.>": {other} for other in ROLES},
    }

    async def hear(_: object) -> None:
        """Nothing is said here."""

    for subject in hears:
        await connection.subscribe(subject, hear)
    await connection.flush()
    denied = {subject.lower() for subject, roles in hears.items() if role not in roles}
    await until(lambda: connection.denied >= denied)
    assert connection.denied == denied


async def test_a_refused_publish_is_an_error_and_not_a_wait(pool: Pool) -> None:
    await pool.bus("scheduler")
    learner = await pool.bus("learner")
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(BusRefused, match="'learner' is not allowed to publish"):
            await learner.publish("resile.job.job-1.running", hello())
        leases: Bucket[Lease] = learner.bucket(subjects.LEASE)
        with pytest.raises(BusRefused):
            await leases.create("scheduler", Lease(epoch=9, holder="thief", counter=0))


async def test_each_role_does_its_work(pool: Pool) -> None:
    scheduler, learner, monitor = [await pool.bus(role) for role in ("scheduler", "learner", "monitor")]
    await scheduler.bucket(subjects.JOBS).create("job-1", record())
    for reader in (learner, monitor):
        assert await reader.bucket(subjects.JOBS).keys() == ["job-1"]
    assert await learner.send(subjects.heartbeat("h"), Heartbeat(host="h", incarnation=1, number=0))
    await learner.publish(subjects.host_event("h", "hello"), hello())
    assert not any(bus.connection.denied for bus in (scheduler, learner, monitor))
