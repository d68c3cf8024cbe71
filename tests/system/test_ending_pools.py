"""Ctrl-C of a real pool saves its jobs first; the next `resile up` in the same home continues with them."""

import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from resile.cli.stopping import ONE_SIGNAL_SECONDS
from resile.pool.worker_processes import workers_below
from resile_shared.messages.jobs import JobState
from resile_testing.waiting import PATIENCE_SECONDS

from .conftest import TRAIN
from .pools import UpPool, pool_up

pytestmark = pytest.mark.long

TWO_HOSTS = ("--hosts", 2, "--slots", 2)


@pytest.fixture
def train(tmp_path: Path) -> Path:
    """A script that takes its time as long as the file ``slow`` is there: no job may complete before it is saved."""
    folder = tmp_path / "code"
    folder.mkdir()
    (tmp_path / "slow").touch()
    pause = f"import os; time.sleep(options.pause if os.path.exists({str(tmp_path / 'slow')!r}) else 0)"
    (folder / "train.py").write_text(TRAIN.replace("time.sleep(options.pause)", pause))
    return folder / "train.py"


def submit(pool: UpPool, train: Path, *, number: int, readers: int = 0) -> list[str]:
    """Submit jobs that share the pool, and wait until all of them train."""
    args = ("--pause", 1.0, "--readers", readers)
    jobs = [pool.submit(train, "--max-workers", 4, "--", *args) for _ in range(number)]
    for job in jobs:
        pool.becomes(job, lambda job: job["workers"] == 4 // number and job["iteration"] >= 2)
    return jobs


def saved_at(view: dict[str, Any]) -> int:
    """Check that the job was saved and lost nothing by it; return at which iteration."""
    history = view["history"]
    assert not [item for item in history if "no worker is left" in item["reason"]], history
    (saved,) = [item for item in history if item["kind"] == "queued" and "saved" in item["reason"]]
    resumed = next(item for item in history if item["kind"] == "allocation" and item["number"] > saved["number"])
    assert resumed["iteration"] == saved["iteration"] > 0, history
    return int(saved["iteration"])


def complete(home: Path, jobs: list[str], sha256: str, *options: object) -> list[dict[str, Any]]:
    """Start the next pool in the same home; return its jobs when they have completed, in no time from here."""
    (home.parent / "slow").unlink()
    with pool_up(home, *(options or TWO_HOSTS)) as pool:
        views = [pool.completed(job) for job in jobs]
    assert [view["params_sha256"] for view in views] == [sha256] * len(jobs)
    return views


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, id="SIGINT"), pytest.param(signal.SIGTERM, marks=pytest.mark.nightly, id="SIGTERM")],
)
def test_jobs_that_span_two_hosts_are_saved_before_anything_stops(
    number: signal.Signals, tmp_path: Path, train: Path, undisturbed: str
) -> None:
    home = tmp_path / "home"
    with pool_up(home, *TWO_HOSTS) as pool:
        jobs = submit(pool, train, number=2)
        ended = pool.end(number)
    lines = ended.err.splitlines()
    assert (ended.status, lines[0], lines[-1]) == (
        0,
        "stopping: all jobs are saved first; press Ctrl-C again to stop at once",
        "the pool has stopped",
    ), ended.err
    assert "saving 2 jobs (job-1, job-2)" in lines
    assert not pool.left()
    for view in complete(home, jobs, undisturbed):
        saved_at(view)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_a_signal_to_all_processes_saves_the_jobs_too(
    number: signal.Signals, tmp_path: Path, train: Path, undisturbed: str
) -> None:
    """As systemd, Slurm and a reboot send it: to the services, the bus, and the DataLoader workers of scripts."""
    home = tmp_path / "home"
    with pool_up(home, *TWO_HOSTS) as pool:
        jobs = submit(pool, train, number=2, readers=1)
        ended = pool.end(number, to_all=True)
    assert ended.status == 0, ended.err
    assert ended.err.splitlines()[-1] == "the pool has stopped"
    assert not pool.left()
    for view in complete(home, jobs, undisturbed):
        saved_at(view)


def test_jobs_are_saved_without_the_monitor_that_an_upgrade_under_the_pool_keeps_from_restarting(
    tmp_path: Path, train: Path, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, installed = tmp_path / "home", tmp_path / "installed"
    installed.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(installed))
    with pool_up(home, *TWO_HOSTS) as pool:
        jobs = submit(pool, train, number=1)
        newer = installed / "resile-9.9.9.dist-info"
        newer.mkdir()
        (newer / "METADATA").write_text("Metadata-Version: 2.1\nName: resile\nVersion: 9.9.9\n")
        pool.service("resile_monitor").kill()
        ended = pool.end(signal.SIGINT)
    assert ended.status == 0, ended.err
    assert "monitor not restarted: 9.9.9 of Resile is installed now" in ended.err
    shutil.rmtree(newer)
    for view in complete(home, jobs, undisturbed):
        saved_at(view)


@pytest.mark.nightly
def test_what_does_not_train_needs_no_saving(tmp_path: Path, train: Path, undisturbed: str) -> None:
    home = tmp_path / "home"
    slow = train.with_name("slow.py")
    wait = f"while not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.1)"
    slow.write_text(f"import pathlib, time\n{wait}\n{TRAIN}")
    with pool_up(home, *TWO_HOSTS) as pool:
        (paused,) = submit(pool, train, number=1)
        assert pool.run("pause", paused).status == 0
        pool.becomes(paused, lambda job: job["state"] == "paused")
        starting = pool.submit(slow, "--max-workers", 4)
        pool.becomes(starting, lambda job: job["state"] == "starting")
        waiting = pool.submit(train, "--min-workers", 4)
        agents = [child.pid for child in pool.children() if "resile_learner" in child.cmdline()]
        until_running(agents, num_workers=4)
        ended = pool.end(signal.SIGINT)
    assert ended.status == 0, ended.err
    (tmp_path / "go").touch()
    (tmp_path / "slow").unlink()
    with pool_up(home, *TWO_HOSTS) as pool:
        for job in (starting, waiting):
            assert pool.completed(job)["params_sha256"] == undisturbed
        assert pool.view(paused)["state"] == "paused"
        assert pool.run("resume", paused).status == 0
        assert pool.completed(paused)["params_sha256"] == undisturbed


def until_running(agents: list[int], *, num_workers: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while sum(len(list(workers_below(agent, ""))) for agent in agents) < num_workers:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.nightly
@pytest.mark.parametrize("module", ["resile_scheduler", "resile_monitor", "nats-server"])
def test_a_service_that_restarts_just_then_costs_time_alone(
    module: str, tmp_path: Path, train: Path, undisturbed: str
) -> None:
    home = tmp_path / "home"
    with pool_up(home, *TWO_HOSTS) as pool:
        jobs = submit(pool, train, number=2)
        pool.service(module).kill()
        ended = pool.end(signal.SIGINT)
    assert ended.status == 0, ended.err
    for view in complete(home, jobs, undisturbed):
        saved_at(view)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["frozen", "lost"])
def test_a_host_that_is_frozen_or_lost_does_not_keep_the_others_from_saving(
    number: signal.Signals, tmp_path: Path, train: Path, undisturbed: str
) -> None:
    home = tmp_path / "home"
    with pool_up(home, *TWO_HOSTS) as pool:
        jobs = submit(pool, train, number=1)
        agent = pool.service("hosts/host-2")
        for process in (agent, *agent.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # it ended with its parent
                process.send_signal(number)
        ended = pool.end(signal.SIGINT)
    assert ended.status == 0, ended.err
    assert not pool.left()
    (view,) = complete(home, jobs, undisturbed)
    saved_at(view)


def test_a_job_that_cannot_be_saved_is_named_and_the_status_says_so(
    tmp_path: Path, train: Path, undisturbed: str
) -> None:
    home, storage = tmp_path / "home", tmp_path / "home" / "storage"
    with pool_up(home, *TWO_HOSTS, "--grace-seconds", 8) as pool:
        jobs = submit(pool, train, number=1)
        storage.rename(away := home / "away")
        storage.write_text("a file, so nothing can be stored below it")
        ended = pool.end(signal.SIGINT)
    assert ended.status == 1
    assert ended.last_error.startswith("resile: not saved within 8 s: 1 job (job-1)"), ended.err
    assert not pool.left()
    storage.unlink()
    away.rename(storage)
    complete(home, jobs, undisturbed)


@pytest.mark.nightly
def test_a_second_signal_stops_at_once_and_says_what_is_lost(tmp_path: Path, train: Path, undisturbed: str) -> None:
    home = tmp_path / "home"
    with pool_up(home, *TWO_HOSTS) as pool:
        jobs = submit(pool, train, number=1)
        workers = [psutil.Process(pid) for pid in worker_pids(pool)]
        for worker in workers:
            worker.suspend()  # it cannot save
        pool.process.send_signal(signal.SIGINT)
        assert pool.process.stderr is not None
        assert "all jobs are saved first" in pool.process.stderr.readline()
        time.sleep(2 * ONE_SIGNAL_SECONDS)
        ended = pool.end(signal.SIGINT)
    assert ended.status == 130
    assert "stopping at once: jobs that are not saved yet lose what they trained since" in ended.err
    assert not pool.left()
    complete(home, jobs, undisturbed)


def worker_pids(pool: UpPool) -> list[int]:
    agents = [child.pid for child in pool.children() if "resile_learner" in child.cmdline()]
    return [worker.pid for agent in agents for worker in workers_below(agent, "")]


@pytest.mark.nightly
def test_a_pool_that_is_stopped_while_it_starts_again_loses_nothing(
    tmp_path: Path, train: Path, undisturbed: str
) -> None:
    home = tmp_path / "home"
    with pool_up(home, *TWO_HOSTS) as pool:
        jobs = submit(pool, train, number=1)
        assert pool.end(signal.SIGINT).status == 0
    with pool_up(home, *TWO_HOSTS) as pool:
        pool.becomes(jobs[0], lambda job: JobState(job["state"]) is not JobState.QUEUED)
        ended = pool.end(signal.SIGINT)
    assert ended.status == 0, ended.err
    (view,) = complete(home, jobs, undisturbed)
    assert not [item for item in view["history"] if "no worker is left" in item["reason"]]
    starts = [item["iteration"] for item in view["history"] if item["kind"] == "allocation"]
    assert starts == sorted(starts)


@pytest.mark.nightly
def test_hosts_that_are_drained_one_right_after_the_other_lose_nothing(
    tmp_path: Path, train: Path, undisturbed: str
) -> None:
    home = tmp_path / "home"
    with pool_up(home, *TWO_HOSTS) as pool:
        jobs = submit(pool, train, number=1)
        for host in ("host-1", "host-2"):
            assert pool.run("drain", host).status == 0
        pool.becomes(jobs[0], lambda job: job["state"] == "queued")
        assert pool.end(signal.SIGINT).status == 0
    (view,) = complete(home, jobs, undisturbed)
    saved_at(view)
