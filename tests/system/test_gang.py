"""A script for torchrun runs on a pool as it is: on two hosts at once, and again if it can start again."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from .pools import UpPool, pool_up
from .running import SCRIPTS

pytestmark = pytest.mark.long
SCRIPT = SCRIPTS / "gang.py"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpPool]:
    with pool_up(tmp_path_factory.mktemp("gangs") / "home", "--hosts", 2, "--slots", 2) as pool:
        yield pool


def test_its_processes_find_each_other_on_two_hosts(pool: UpPool, tmp_path: Path) -> None:
    job = pool.submit("--gang", 4, "--", SCRIPT, "--snapshot", tmp_path / "snapshot.pt")
    view = pool.completed(job)
    logs = pool.run("logs", job).out
    assert sorted(re.findall(r"rank (\d) of 4, (\d) of 2 on its host", logs)) == [
        (str(rank), str(rank % 2)) for rank in range(4)
    ]
    assert view["bits"].startswith("not promised")
    assert view["params_sha256"] is None
    assert [item["workers"] for item in view["history"] if item["kind"] == "allocation"] == [4]
    assert (tmp_path / "snapshot.pt").exists()
    assert len(list(tmp_path.glob("last-*"))) == 4, "threads of the script end before it is complete"


@pytest.mark.nightly
def test_one_that_may_not_start_again_fails_with_its_worker(pool: UpPool, tmp_path: Path) -> None:
    options = ("--snapshot", tmp_path / "snapshot.pt", "--kill", tmp_path / "killed")
    ended = pool.run("wait", pool.submit("--gang", 4, "--", SCRIPT, *options))
    assert ended.status != 0
    assert "was killed by SIGKILL (Killed): a gang cannot continue without all its workers" in ended.err


def test_one_that_may_start_again_does_when_a_host_is_lost(pool: UpPool, tmp_path: Path) -> None:
    snapshot, hold = tmp_path / "snapshot.pt", tmp_path / "hold"
    job = pool.submit("--gang", 4, "--restartable", "--", SCRIPT, "--snapshot", snapshot, "--hold", hold)
    pool.becomes(job, lambda view: view["state"] == "running" and snapshot.exists())
    (agent,) = (child for child in pool.children() if "--host host-2" in " ".join(child.cmdline()))
    agent.send_signal(signal.SIGKILL)
    pool.becomes(job, lambda view: any(item["kind"] == "queued" for item in view["history"]))
    hold.touch()
    view = pool.completed(job)
    assert any("host-2 lost: all its workers start again" in item["reason"] for item in view["history"])
    logs = pool.run("logs", job).out
    assert logs.count("epoch 0") <= 4, "it goes on from its snapshot"


@pytest.mark.nightly
def test_what_contradicts_itself_is_refused(pool: UpPool) -> None:
    assert "it always has 4 workers" in pool.run("submit", "--gang", 4, "--max-workers", 8, "--", SCRIPT).err
    assert "only for gang jobs" in pool.run("submit", "--restartable", "--", SCRIPT).err
