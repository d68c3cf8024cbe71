"""`resile publish`: on the real bus, with the account that systems outside the pool get."""

import asyncio
import json
from pathlib import Path

import pytest

from resile.cli import main
from resile_shared.bus.envelope import Received
from resile_shared.messages.commands import Accepted, JobPriority, Refused
from resile_testing.fixtures import Pool

PRIORITY = "resile.command.job.priority"
BODY = '{"job_id": "job-1", "priority": 8000}'


async def published(pool: Pool, *arguments: str) -> int:
    account = ["--credentials", str(pool.server.credentials("publisher"))]
    return await asyncio.to_thread(main, ["publish", *arguments, *account])


async def test_a_command_has_its_effect_once_for_one_id_and_its_answer_is_printed(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler = await pool.bus("scheduler")
    seen: list[JobPriority] = []

    async def change(received: Received[JobPriority]) -> Accepted:
        seen.append(received.message)
        return Accepted(job_id=received.message.job_id)

    await scheduler.answer(PRIORITY, JobPriority, change)
    for _ in range(2):
        assert await published(pool, "job.priority", BODY, "--id", "one", "--json") == 0
        assert json.loads(capsys.readouterr().out)["job_id"] == "job-1"
    assert seen == [JobPriority(job_id="job-1", priority=8000)]


async def test_what_the_pool_refuses_fails_with_its_reason(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    scheduler = await pool.bus("scheduler")

    async def change(received: Received[JobPriority]) -> Refused:
        return Refused(code="unknown", reason=f"there is no job {received.message.job_id}")

    await scheduler.answer(PRIORITY, JobPriority, change)
    assert await published(pool, "job.priority", BODY) == 1
    assert capsys.readouterr().err == "resile: there is no job job-1\n"


async def test_a_pool_that_does_not_answer_is_not_waited_for_for_ever(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    await pool.bus("scheduler")
    assert await published(pool, "job.priority", BODY, "--timeout", "0.5") == 1
    assert "no answer from the pool at nats://" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["job.submit", "{}"], "'job.submit' cannot be published: use one of host.drain, "),
        (["job.priority", "{"], "invalid body of job.priority: Invalid JSON"),
        (["job.priority", '{"job_id": "a", "priority": 0}'], "priority must be an integer from 1 to"),
        (["host.drain", '{"host_id": "a b"}'], "its schema is docs/schemas/HostDrain.json"),
        (["job.stop", '{"job_id": "a"}'], "bus credentials"),
    ],
)
def test_what_cannot_be_published_is_named(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["publish", *arguments, "--home", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
