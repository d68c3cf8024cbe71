"""Live: under elastic-batch a job that declares a range for its batch gets slots and batch together."""

from pathlib import Path

import pytest

from resile.client import AsyncClient, find_server
from resile_shared.http.api import JobView

from .paced import CALLBACK, Pace, becomes, submit
from .pools import pool_up
from .running import plain
from .test_restarts import SCRIPT

FIXED = SCRIPT.replace("batch_size=48", "batch_size=48, num_shards=24")
ELASTIC = FIXED.replace("num_shards=24", "num_shards=24, batch_range=(48, 384)").replace(
    CALLBACK,
    """
import pathlib, time
from resile.training import Callback

class Pace(Callback):
    def __init__(self, file):
        self.file = file and pathlib.Path(file)

    def on_epoch(self, loop, epoch):
        if self.file and self.file.read_text() == "0":
            time.sleep(3)
""",
)
"""It waits between epochs, and not in iterations: these are measured."""


@pytest.mark.nightly
async def test_a_job_with_a_range_gets_a_larger_batch_beside_one_with_a_fixed_batch(tmp_path: Path) -> None:
    scripts = {}
    for name, text in (("fixed", FIXED), ("elastic", ELASTIC)):
        scripts[name] = tmp_path / name / "train.py"
        scripts[name].parent.mkdir()
        scripts[name].write_text(text)
    paces = [Pace(tmp_path / f"pace-{name}") for name in scripts]
    with pool_up(tmp_path / "home", "--slots", 4, "--policy", "elastic-batch") as pool:
        async with AsyncClient(find_server(home=pool.home)) as client:
            fixed = await submit(client, scripts["fixed"], "--pace", paces[0].file, name="fixed")
            await becomes(client, fixed, lambda view: view.workers == 4)
            elastic = await submit(client, scripts["elastic"], "--pace", paces[1].file, name="elastic", min_workers=2)
            await becomes(client, elastic, has_larger_batch)
            for pace in paces:
                pace.fast_until(10**6)
        views = [pool.completed(job) for job in (fixed, elastic)]
    assert views[0]["params_sha256"] == plain(scripts["fixed"]), "a fixed batch: the same bits"
    assert all(item.get("batch_size") is None for item in views[0]["history"])
    assert {item["workers"] for item in views[0]["history"] if item["kind"] == "allocation"} > {4}, "it made room"
    larger = [item for item in views[1]["history"] if (item.get("batch_size") or 0) > 48]
    assert "times as fast as on 1 slot with a batch of 48" in larger[0]["reason"]
    for view in views:
        assert all(epoch["once"] == epoch["samples"] == 480 for epoch in view["ledger"])


def has_larger_batch(view: JobView) -> bool:
    return any((item.batch_size or 0) > 48 for item in view.history)
