"""Two tenants share a pool: a quota is borrowed and given back, usage is counted, and the bits stay the same."""

from pathlib import Path

import pytest

from resile.client import AsyncClient, find_server

from .paced import Pace, becomes, submit
from .pools import UpPool, pool_up
from .running import plain
from .test_policy import share
from .test_restarts import SCRIPT


@pytest.mark.nightly
@pytest.mark.long
async def test_a_borrowed_quota_is_given_back_and_what_was_used_is_counted(tmp_path: Path) -> None:
    script = tmp_path / "code" / "train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT.replace("batch_size=48", "batch_size=48, num_shards=24"))
    paces = [Pace(tmp_path / name) for name in ("first", "second")]
    with pool_up(tmp_path / "home", "--slots", 4) as pool:
        async with AsyncClient(find_server(home=pool.home)) as client:
            pool.ask("tenant", "set", "owner", "--quota", 3)
            refused = pool.run("tenant", "set", "borrower", "--quota", 2)
            assert refused.status == 1
            assert "it has 4 slots, of which other tenants have quotas for 3" in refused.last_error
            first = await submit(client, script, "--pace", paces[0].file, name="first", tenant="borrower")
            await becomes(client, first, lambda view: view.workers == 4)
            second = await submit(client, script, "--pace", paces[1].file, name="second", tenant="owner")
            pair = list(zip((first, second), paces, strict=True))
            await share(client, pair, (1, 3))
            pool.service("resile_scheduler").kill()
            pool.ask("tenant", "delete", "owner")
            await share(client, pair, (2, 2))
            for pace in paces:
                pace.fast_until(10**6)
        views = [pool.completed(job) for job in (first, second)]
        used = slot_hours(pool)
        pool.ask("delete", first)
        assert slot_hours(pool) == used, "what a deleted job has used stays with its tenant"
        changes = [e["data"] for e in pool.ask("events")["events"] if e["subject"] == "resile.pool.tenant"]
    assert {view["params_sha256"] for view in views} == {plain(script)}
    reasons = [item["reason"] for item in views[0]["history"] if item["kind"] == "allocation"]
    assert "tenant owner deleted" in reasons
    assert all(hours > 0 for hours in used.values())
    assert set(used) == {"borrower", "owner"}
    assert [(change["number"], change["tenant"], change["share"]) for change in changes] == [
        (1, "owner", {"weight": 1, "quota": 3, "cap": 0}),
        (2, "owner", None),
    ]


def slot_hours(pool: UpPool) -> dict[str, float]:
    return {tenant["tenant"]: tenant["slot_hours"] for tenant in pool.ask("usage")["tenants"]}
