"""Data that is registered: fetched once to a host for all its jobs, and named before it costs training time."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import TRAIN
from .pools import UpPool, pool_up
from .running import plain, run
from .test_examples import EXAMPLES

pytestmark = pytest.mark.long

SCRIPT = f"""
import resile.training
print("data", (resile.training.dataset("few") / "one.txt").read_text())
{TRAIN}"""


def resile(*arguments: object, home: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "resile", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "RESILE_HOME": str(home)}, timeout=240
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "few"
    folder.mkdir()
    (folder / "one.txt").write_text("first")
    return folder


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    path = tmp_path / "code" / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.nightly
def test_the_example_has_the_same_bits_with_registered_data_and_in_a_plain_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example, home = EXAMPLES / "dataset.py", tmp_path / "home"
    monkeypatch.setenv("RESILE_HOME", str(home))
    subprocess.run([sys.executable, example, "--write", tmp_path / "digits"], check=True)
    without = subprocess.run([sys.executable, example], capture_output=True, text=True, check=False)
    assert "there is no dataset digits for runs without a pool (none is registered" in without.stderr
    assert "or set RESILE_DATASET_DIGITS to a folder" in without.stderr
    assert resile("dataset", "add", "digits", tmp_path / "digits", "--local", home=home).returncode == 0
    registered = plain(example)
    monkeypatch.setenv("RESILE_DATASET_DIGITS", str(tmp_path / "digits"))
    assert plain(example) == registered
    monkeypatch.delenv("RESILE_DATASET_DIGITS")
    outcome = run(example, "--data", "digits", "--plan", "0:1,4:3,20:2", home=home)
    assert outcome.sha == registered
    assert outcome.sizes == [(0, 1), (4, 3), (20, 2)]
    outcome.assert_every_sample_once(epochs=3)
    assert outcome.errors.count("dataset digits: fetching") == 1
    (tmp_path / "digits" / "more.csv").write_text("1")
    changed = run(example, "--data", "digits", "--workers", "1", home=home)
    assert changed.status == 1
    assert "dataset digits has changed since it was added" in changed.errors
    assert changed.result["iteration"] == 0
    ended = resile("run", example, "--data", "other", home=home)
    assert ended.returncode == 2
    assert "there is no dataset other for runs without a pool (known are digits)" in ended.stderr
    ended = resile("run", example, "--mount", tmp_path / "nowhere", home=home)
    assert (ended.returncode, "there is no such file or folder" in ended.stderr) == (2, True)


def test_two_jobs_at_once_fetch_the_data_once_and_a_change_is_named_before_training(
    script: Path, source: Path, tmp_path: Path
) -> None:
    with pool_up(tmp_path / "home", "--hosts", 1, "--slots", 2, "--data-cache", "0.000001") as pool:
        missing = pool.run("submit", script, "--data", "few")
        assert (missing.status, "there is no dataset few" in missing.last_error) == (1, True)
        assert pool.ask("dataset", "add", "few", source)["num_files"] == 1
        assert [each["name"] for each in pool.ask("dataset", "list")["datasets"]] == ["few"]
        arguments = ("--data", "few", "--mount", source, "--max-workers", 1)
        jobs = [pool.submit(script, *arguments) for _ in range(2)]
        assert [pool.run("wait", job).status for job in jobs] == [0, 0]
        logs = [pool.run("logs", job).out for job in jobs]
        assert all("data first\n" in log for log in logs)
        assert sum(log.count("dataset few: fetching 5 bytes in 1 file") for log in logs) == 1
        (source / "one.txt").write_text("other")
        assert pool.run("dataset", "add", "few", source).status == 0
        job = pool.submit(script, "--data", "few")
        assert pool.run("wait", job).status == 0
        assert "data other\n" in pool.run("logs", job).out
        assert_fails_clearly(pool, script, source)
        assert pool.run("dataset", "remove", "few").status == 0
        assert pool.ask("dataset", "list") == {"datasets": []}


def assert_fails_clearly(pool: UpPool, script: Path, source: Path) -> None:
    """A script that asks for data which its job was not given, and a path that no host has."""
    job = pool.submit(script)
    waited = pool.run("wait", job)
    assert waited.status == 1
    assert "submit it with `--data few`" in pool.run("logs", job).out
    (source / "more").touch()
    assert pool.run("dataset", "add", "changed", source).status == 0
    (source / "more").unlink()
    job = pool.submit(script, "--data", "changed", "--max-workers", 1)
    waited = pool.run("wait", job)
    assert (waited.status, "has changed since it was added" in waited.last_error) == (1, True)
    assert pool.run("dataset", "remove", "changed").status == 0
    (source / "large").write_bytes(bytes(2000))
    assert pool.run("dataset", "add", "few", source).status == 0
    job = pool.submit(script, "--data", "few", "--max-workers", 1)
    waited = pool.run("wait", job)
    assert waited.status == 1
    assert "has 2.0 kB, and the cache of this host at most 1.0 kB: start the host with a larger" in waited.last_error
    (source / "large").unlink()
    assert pool.run("dataset", "add", "few", source).status == 0
    job = pool.submit(script, "--data", "few", "--mount", source / "nowhere", "--max-workers", 1)
    waited = pool.run("wait", job)
    assert waited.status == 1
    assert re.search(rf"there is no {source}/nowhere on this host: mount it here", waited.last_error)
