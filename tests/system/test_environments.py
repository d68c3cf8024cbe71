"""Jobs bring their packages: each host installs them once, and jobs do not see those of others."""

from pathlib import Path

import pytest

from tests.learner.wheels import add_wheel, offline

from .conftest import TRAIN
from .pools import pool_up
from .running import run

pytestmark = pytest.mark.long

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
            pool.becomes(job, lambda view: view["iteration"], seconds=120)
            log = pool.run("logs", job).out
            assert f"marker {version}\n" in log
            assert f"Successfully installed marker-{version}" in log
        assert [pool.view(job)["state"] for job in jobs.values()] == ["running", "running"]
        for job in jobs.values():
            assert pool.run("stop", job).status == 0


def test_a_package_that_is_nowhere_fails_its_job_with_one_clear_line(script: Path, tmp_path: Path) -> None:
    with pool_up(tmp_path / "home", "--hosts", 1, "--slots", 1) as pool:
        job = pool.submit(script, "--with", "missing==3")
        waited = pool.run("wait", job)
        assert waited.status == 1
        assert "Could not find a version that satisfies the requirement missing==3" in waited.last_error
        assert "No matching distribution found for missing==3" in pool.run("logs", job).out


def test_a_run_with_packages_has_the_bits_of_a_plain_one(script: Path, tmp_path: Path) -> None:
    plain = script.with_name("plain.py")
    plain.write_text(TRAIN)
    shas = {
        run(path, "--plan", "0:1,5:3,9:2", *options, home=tmp_path / "home").sha
        for path, options in ((script, ("--with", "marker")), (plain, ()))
    }
    assert len(shas) == 1
    assert len(list((tmp_path / "home" / "environments").glob("*/complete"))) == 1
