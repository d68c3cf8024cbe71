"""`resile chaos` attacks a pool that may be attacked, and no other."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from resile.chaos.s3_server import S3Server
from resile.cli import main
from resile_testing.fixtures import s3
from resile_testing.waiting import PATIENCE_SECONDS

from ..system.pools import UpPool, pool_up

__all__ = ["s3"]

SCRIPT = Path(__file__).with_name("scripts") / "attacked.py"


def announce(home: Path, *, chaos: bool) -> None:
    """Make ``home`` that of a pool whose `resile up` is this process."""
    pool = {"url": "http://127.0.0.1:1", "token": "t", "pid": os.getpid(), "chaos": chaos}
    (home / "pool.json").write_text(json.dumps(pool))
    (home / "storage-url").write_text((home / "storage").as_uri())


def refusal(capsys: pytest.CaptureFixture[str], home: Path, *words: str) -> str:
    """Return the error of a command that is refused."""
    assert main(["chaos", *words, "--home", str(home)]) == 2
    return capsys.readouterr().err


def test_a_pool_that_was_not_opened_to_chaos_is_not_attacked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    announce(tmp_path, chaos=False)
    assert "`resile up --open-to-chaos`" in refusal(capsys, tmp_path, "kill", "bus")
    assert "`resile up --open-to-chaos`" in refusal(capsys, tmp_path, "campaign", "--job", "job-1")


def test_where_no_pool_runs_nothing_is_attacked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "no pool is running" in refusal(capsys, tmp_path, "kill", "bus")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("partition", "host", "host-1"), "`resile up --namespaces`"),
        (("disk-full", "object-store"), "shares its file system"),
        (("kill", "object-store"), "--object-store-pid"),
        (("partition", "worker", "job-1"), "links belong to hosts"),
        (("kill", "worker"), "needs the name of a job"),
        (("corrupt", "object-store"), "needs the name of a job"),
        (("campaign",), "--own-pool"),
        (("campaign", "--job", "job-1", "3"), "are for the script of --own-pool"),
    ],
)
def test_what_cannot_be_attacked_on_this_pool_is_refused_with_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], why: str
) -> None:
    announce(tmp_path, chaos=True)
    (tmp_path / "storage").mkdir()
    assert why in refusal(capsys, tmp_path, *words)


def test_attacks_start_without_torch_which_takes_seconds_to_import() -> None:
    code = "import sys, resile.cli.chaos_runs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpPool]:
    """Two hosts of one slot."""
    with pool_up(tmp_path_factory.mktemp("pool") / "home", "--hosts", 2, "--slots", 1, "--open-to-chaos") as pool:
        yield pool


@pytest.mark.long
def test_one_attack_after_the_other_tells_how_long_the_pool_took_to_recover(pool: UpPool) -> None:
    job = pool.submit(SCRIPT, "--", "--epochs", 400, "--pause", 0.05)
    pool.becomes(job, lambda view: view["checkpoint"])
    for words, parts in [
        (("kill", "worker", job), {job}),
        (("freeze", "worker", job, "--seconds", 1), {job}),
        (("slow", "scheduler", "--seconds", 1), {"scheduler"}),
        (("kill", "monitor"), {"monitor"}),
        (("kill", "agent", "host-2"), {job, "host-2"}),
        (("kill", "bus"), {"bus"}),
    ]:
        pool.becomes(job, lambda view: view["workers"] == 2)
        told = pool.ask("chaos", *words)
        assert told["recovered"].keys() >= parts, told
        assert all(seconds is not None for seconds in told["recovered"].values()), told
    pool.becomes(job, lambda view: view["workers"] == 2)
    number = int(pool.ask("chaos", "kill", "worker", job)["target"].partition("/")[2])
    gone = pool.run("chaos", "kill", "worker", f"{job}/{number}")
    assert gone.status == 1
    assert f"worker {job}/{number} is not running" in gone.last_error
    assert "host host-9 is not running" in pool.run("chaos", "freeze", "host", "host-9").last_error
    pool.run("stop", job)


@pytest.mark.nightly
def test_an_object_store_is_frozen_and_killed_and_checkpoints_come_again(tmp_path: Path, s3: S3Server) -> None:
    options = ("--slots", 1, "--storage", s3.url + "/pool", "--open-to-chaos")
    with pool_up(tmp_path / "home", *options) as pool:
        job = pool.submit(SCRIPT, "--", "--epochs", 1000, "--pause", 0.05)
        pool.becomes(job, lambda view: view["checkpoint"])
        attack = ("object-store", job, "--object-store-pid", s3.pid)
        assert pool.ask("chaos", "freeze", *attack, "--seconds", 1)["recovered"][f"checkpoint of {job}"] is not None
        with ThreadPoolExecutor() as elsewhere:  # the server would die with a thread that starts it
            killing = elsewhere.submit(pool.ask, "chaos", "kill", *attack)
            wait_for_end(s3)
            s3.kill()
            s3.start()
            told = killing.result()
        assert told["recovered"][f"checkpoint of {job}"] is not None
        assert pool.run("chaos", "kill", *attack).status == 1
        pool.run("stop", job)


def wait_for_end(server: S3Server) -> None:
    """Return when the server is gone."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while server.running:
        assert time.monotonic() < deadline
        time.sleep(0.01)
