"""Systems outside of the pool: what docs/events.md shows them, with the scripts that it shows."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from resile import AsyncClient
from resile.client import find_server

from .paced import Pace, becomes, submit
from .pools import pool_up
from .test_walkthroughs import PACED

EXAMPLES = Path(__file__).parents[2] / "examples" / "events"


@pytest.mark.long
async def test_a_reclaim_notice_over_nats_and_a_cron_script_move_a_job_that_loses_nothing(tmp_path: Path) -> None:
    script = tmp_path / "code" / "train.py"
    script.parent.mkdir()
    script.write_text(PACED)
    pace = Pace(tmp_path / "pace")
    with pool_up(tmp_path / "home", "--hosts", 2, "--slots", 2) as pool:
        server = find_server(home=pool.home)
        account = pool.home / "bus" / "credentials" / "publisher.json"
        async with AsyncClient(server) as client:
            job = await submit(client, script, pace.file, name="paced")
            await becomes(client, job, lambda view: view.workers == 4)

            notice = [sys.executable, "-I", EXAMPLES / "spot_reclaim.py", account, "host-2", "--seconds", "600"]
            said = await ran(notice)
            assert said == "host-2 drains within 600 s\n"
            moved = await becomes(client, job, lambda view: view.workers == 2)
            assert {slot.partition("/")[0] for slot in moved.slots} == {"host-1"}
            assert moved.history[-1].reason == "host-2 draining"

            cron = [EXAMPLES / "night_priority.sh", job, "9000"]
            environment = {**os.environ, "RESILE_SERVER": server.url, "RESILE_TOKEN": server.token}
            await ran(cron, env=environment)
            assert (await client.job(job)).priority == 9000

            published = pool.ask("publish", "job.priority", f'{{"job_id": "{job}", "priority": 4000}}')
            assert published["kind"] == "accepted"
            assert (await client.job(job)).priority == 4000
            unknown = pool.run("publish", "host.drain", '{"host_id": "nowhere"}')
            assert unknown.status == 1
            assert "nowhere" in unknown.last_error
        pace.fast_until(10**6)
        ended = pool.completed(job)
    assert all((epoch["more"], epoch["never"]) == (0, 0) for epoch in ended["ledger"])
    kinds = {item["kind"] for item in ended["history"]}
    assert not kinds & {"recovering", "resumed"}, kinds


async def ran(command: Sequence[object], *, env: Mapping[str, str] | None = None) -> str:
    """What a command prints that succeeds."""
    done = await asyncio.to_thread(
        subprocess.run, list(map(str, command)), capture_output=True, text=True, timeout=90, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
