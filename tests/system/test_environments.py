"""Jobs bring their packages: each host installs them once, and jobs do not see those of others."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.learner.wheels import add_slow_source, add_wheel, offline

from .conftest import TRAIN
from .pools import pool_up
from .running import run

pytestmark = pytest.mark.long

SLOW_SCRIPT = f"import slow\n{TRAIN}"
SCRIPT = f"import marker\nprint('marker', marker.version)\n{TRAIN}"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that needs a package which only an index without a network has."""
    for version in ("1.0", "2.0"):
        add_wheel(tmp_path / "wheels", "marker", version)
    for name, value in offline(tmp_path / "wheels").items():
        monkeypatch.setenv(name, value)
    (tmp_path / "code").mkdir()
    path = tmp_path / "code" / "train.py"
    path.write_text(SCRIPT)
    return path


class Slow:
    """A script that needs a package whose build takes ten minutes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.script = folder / "code" / "slow_train.py"
        self.script.write_text(SLOW_SCRIPT)
        add_slow_source(folder / "wheels", "slow", started=folder / "started")

    def builds(self) -> int:
        """Wait until it is being built; return the process that builds it."""
        started = self._folder / "started"
        while not started.exists() or not started.read_text():
            time.sleep(0.05)
        return int(started.read_text())

    def can_be_built(self) -> None:
        """Let builds that begin from now on succeed at once."""
        (self._folder / "wheels" / "slow-1.0.tar.gz").unlink()
        add_wheel(self._folder / "wheels", "slow", "1.0")


@pytest.fixture
def slow(script: Path, tmp_path: Path) -> Slow:
    """A package that is built slowly."""
    return Slow(tmp_path)


def test_two_jobs_with_conflicting_versions_train_on_one_host_at_the_same_time(script: Path, tmp_path: Path) -> None:
    requirements = script.with_name("requirements.txt")
    requirements.write_text("marker<2  # the old one\n")
    with pool_up(tmp_path / "home", "--hosts", 1, "--slots", 2) as pool:
        arguments = ("--max-workers", 1, "--", "--pause", 0.05, "--epochs", 10_000)
        jobs = {
            "1.0": pool.submit(script, "--requirements", requirements, *arguments),
            "2.0": pool.submit(script, "--with", "marker>=2", *arguments),
        }
        for version, job in jobs.items():
            pool.becomes(job, lambda view: view["iteration"])
            log = pool.run("logs", job).out
            assert f"marker {version}\n" in log
            assert f"Successfully installed marker-{version}" in log
        assert [pool.view(job)["state"] for job in jobs.values()] == ["running", "running"]
        for job in jobs.values():
            assert pool.run("stop", job).status == 0


def test_a_package_that_is_nowhere_fails_its_job_with_one_clear_line_before_it_has_a_slot(
    script: Path, tmp_path: Path
) -> None:
    with pool_up(tmp_path / "home", "--hosts", 1, "--slots", 1) as pool:
        job = pool.submit(script, "--with", "missing==3")
        waited = pool.run("wait", job)
        assert waited.status == 1
        assert "Could not find a version that satisfies the requirement missing==3" in waited.last_error
        log = pool.run("logs", job).out
        assert "[environment on host-1] ERROR: No matching distribution found for missing==3" in log
        history = pool.ask("job", job)["history"]
        assert "allocation" not in {item["kind"] for item in history}


@pytest.mark.nightly
def test_another_job_keeps_all_slots_while_an_environment_is_built(slow: Slow, tmp_path: Path) -> None:
    with pool_up(tmp_path / "home", "--hosts", 2, "--slots", 2) as pool:
        (tmp_path / "code" / "other.py").write_text(TRAIN)
        other = pool.submit(tmp_path / "code" / "other.py", "--", "--pause", 0.05, "--epochs", 10_000)
        pool.becomes(other, lambda view: view["workers"] == 4 and view["iteration"])
        job = pool.submit(slow.script, "--with", "slow", "--priority", 1_000_000, "--", "--epochs", 1)
        slow.builds()
        seen = pool.view(job)
        assert seen["reason"] in {f"host-{number} is building the environment of {job}" for number in (1, 2)}
        assert job in pool.run("top").out
        iteration = pool.view(other)["iteration"]
        pool.becomes(other, lambda view: view["iteration"] > iteration)
        assert pool.view(other)["workers"] == 4
        slow.can_be_built()
        pool.run("stop", job)
        again = pool.submit(slow.script, "--with", "slow", "--", "--epochs", 1)
        pool.completed(again)
        assert pool.run("stop", other).status == 0


@pytest.mark.nightly
def test_an_agent_that_is_killed_in_mid_build_begins_again(slow: Slow, tmp_path: Path) -> None:
    with pool_up(tmp_path / "home", "--hosts", 1, "--slots", 1) as pool:
        job = pool.submit(slow.script, "--with", "slow", "--", "--epochs", 1)
        slow.builds()
        slow.can_be_built()
        pool.service("resile_learner").kill()
        assert pool.completed(job)["params_sha256"]


@pytest.mark.nightly
def test_a_pip_that_is_killed_in_mid_build_is_begun_again(slow: Slow, tmp_path: Path) -> None:
    with pool_up(tmp_path / "home", "--hosts", 1, "--slots", 1) as pool:
        job = pool.submit(slow.script, "--with", "slow", "--", "--epochs", 1)
        pid = slow.builds()
        slow.can_be_built()
        os.killpg(os.getpgid(pid), signal.SIGKILL)
        pool.completed(job)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk that is too small for large packages."""
    folder = tmp_path / "home" / "hosts" / "host-1" / "environments"
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
@pytest.mark.nightly
def test_a_host_with_a_full_disk_is_named_and_leaves_its_slots_to_others(
    script: Path, small_disk: Path, tmp_path: Path
) -> None:
    add_wheel(tmp_path / "wheels", "large", "1.0", num_bytes=20_000_000)
    (tmp_path / "code" / "other.py").write_text(TRAIN)
    with pool_up(tmp_path / "home", "--hosts", 1, "--slots", 1) as pool:
        job = pool.submit(script, "--with", "large", "--with", "marker", "--", "--epochs", 1)
        seen = pool.becomes(job, lambda view: "no space is left" in view["reason"])
        assert seen["reason"].startswith("waiting a while: host-1: ")
        pool.completed(pool.submit(tmp_path / "code" / "other.py", "--", "--epochs", 1))
        subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
        pool.completed(job)


@pytest.mark.nightly
def test_a_run_with_packages_has_the_bits_of_a_plain_one(script: Path, tmp_path: Path) -> None:
    plain = script.with_name("plain.py")
    plain.write_text(TRAIN)
    shas = {
        run(path, "--plan", "0:1,5:3,9:2", *options, home=tmp_path / "home").sha
        for path, options in ((script, ("--with", "marker")), (plain, ()))
    }
    assert len(shas) == 1
    assert len(list((tmp_path / "home" / "environments").glob("*/complete"))) == 1
