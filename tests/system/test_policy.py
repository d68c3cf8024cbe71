"""How jobs share slots is changed while they train, and the pool keeps it whatever is killed or stopped."""

from pathlib import Path
from typing import Any

import pytest

from resile.client import AsyncClient, find_server

from .paced import Pace, becomes, submit
from .pools import UpPool, pool_up
from .running import plain
from .test_pool_same_bits import STAY
from .test_restarts import SCRIPT


@pytest.mark.long
async def test_jobs_follow_each_policy_and_end_with_the_same_bits(tmp_path: Path) -> None:
    script = tmp_path / "code" / "train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT.replace("batch_size=48", "batch_size=48, num_shards=24"))
    paces = [Pace(tmp_path / name) for name in ("first", "second")]
    with pool_up(tmp_path / "home", "--slots", 4) as pool:
        async with AsyncClient(find_server(home=pool.home)) as client:
            first = await submit(client, script, "--pace", paces[0].file, name="first")
            await becomes(client, first, lambda view: view.workers == 4)
            second = await submit(client, script, "--pace", paces[1].file, name="second", priority=6000)
            pair = list(zip((first, second), paces, strict=True))
            await share(client, pair, (2, 2))
            assert pool.ask("policy", "priority") == {"policy": "priority", "preemption": True}
            await share(client, pair, (1, 3))
            pool.service("resile_scheduler").kill()
            await client.set_priority(first, 7000)
            await share(client, pair, (3, 1))
            assert pool.ask("policy") == {"policy": "priority", "preemption": True}
            pool.ask("policy", "fifo")
            await share(client, pair, (4, 0))
            pool.ask("policy", "fairshare")
            await share(client, pair, (2, 2))
            for pace in paces:
                pace.fast_until(10**6)
        views = [pool.completed(job) for job in (first, second)]
        changes = policy_changes(pool)
    assert {view["params_sha256"] for view in views} == {plain(script)}
    reasons = [item["reason"] for item in views[0]["history"] if item["reason"].startswith("policy")]
    assert reasons == ["policy priority", "policy fifo", "policy fairshare"]
    assert [(event["number"], event["policy"]) for event in changes] == [(1, "priority"), (2, "fifo"), (3, "fairshare")]


def test_the_next_pool_keeps_the_policy_unless_it_is_given_another(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with pool_up(home, "--slots", 1, "--policy", "priority") as pool:
        assert pool.ask("policy") == {"policy": "priority", "preemption": True}
        assert pool.ask("policy", "fifo", "--no-preemption") == {"policy": "fifo", "preemption": False}
        refused = pool.run("policy", "chaos")
        assert refused.status == 2
        assert "'fairshare', 'fifo', 'priority'" in refused.last_error
    with pool_up(home, "--slots", 1) as pool:
        assert pool.ask("policy") == {"policy": "fifo", "preemption": False}
    with pool_up(home, "--slots", 1, "--policy", "priority") as pool:
        assert pool.ask("policy") == {"policy": "priority", "preemption": False}


async def share(client: AsyncClient, jobs: list[tuple[str, Pace]], workers: tuple[int, ...]) -> None:
    """Wait until each job has its number of workers, and has trained a while with it."""
    for (job, pace), num in zip(jobs, workers, strict=True):
        begun = await becomes(client, job, lambda view, num=num: view.workers == num)  # type: ignore[misc]
        if num:
            pace.fast_until(begun.iteration + STAY)
            await becomes(client, job, lambda view, begun=begun: view.iteration >= begun.iteration + STAY)  # type: ignore[misc]


def policy_changes(pool: UpPool) -> list[dict[str, Any]]:
    """The changes of the policy, as the event stream has them."""
    events = pool.ask("events")["events"]
    return [event["data"] for event in events if event["subject"] == "resile.pool.policy"]
