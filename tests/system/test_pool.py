"""A pool on this machine, with everything real: `resile up`, and the commands that people use."""

import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resile.cli.stopping import ONE_SIGNAL_SECONDS

from .conftest import TRAIN, Resile
from .pools import UpPool, pool_up
from .running import SCRIPTS, run

pytestmark = pytest.mark.long

EVERYTHING = ("--epochs", "2")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpPool]:
    """Two hosts of four slots, for all tests that leave them as they were."""
    with pool_up(tmp_path_factory.mktemp("pool") / "home", "--hosts", 2, "--slots", 4) as pool:
        yield pool


@pytest.fixture
def train(tmp_path: Path) -> Path:
    """A script that takes its time."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    return folder / "train.py"


def test_a_job_on_the_pool_ends_with_the_bits_of_a_run_without_one(pool: UpPool, tmp_path: Path) -> None:
    alone = run("everything.py", "--workers", "1", home=tmp_path / "alone", args=EVERYTHING)
    job = pool.submit(SCRIPTS / "everything.py", "--max-workers", 3, "--", *EVERYTHING)
    view = pool.completed(job)
    assert view["params_sha256"] == alone.sha
    assert pool.ask("ledger", job) == alone.result["ledger"]
    assert pool.run("model", job, "-o", tmp_path / "model.safetensors").status == 0
    assert (tmp_path / "model.safetensors").stat().st_size > 0


def test_two_jobs_share_by_priority_and_take_what_the_other_leaves(pool: UpPool, train: Path, undisturbed: str) -> None:
    first = pool.submit(train, "--name", "first", "--", "--pause", 0.1, "--epochs", 100, "--shards", 24)
    pool.becomes(first, lambda job: job["workers"] == 8)
    second = pool.submit(train, "--name", "second", "--", "--pause", 0.1, "--epochs", 100, "--shards", 24)
    for job in (first, second):
        pool.becomes(job, lambda job: job["workers"] == 4)
    assert pool.run("priority", "second", 10000).status == 0
    pool.becomes(first, lambda job: job["workers"] == 3)
    pool.becomes(second, lambda job: job["workers"] == 5)
    assert pool.run("stop", "first").status == 0
    waited = pool.run("wait", first)
    assert waited.status == 1
    assert f"{first} stopped" in waited.last_error
    pool.becomes(second, lambda job: job["workers"] == 8)
    assert pool.run("stop", second).status == 0
    slots = [item["workers"] for item in pool.ask("job", first)["history"] if item["kind"] == "allocation"]
    assert slots[:3] == [8, 4, 3]


def test_a_paused_job_goes_on_where_it_was(pool: UpPool, train: Path, undisturbed: str) -> None:
    job = pool.submit(train, "--max-workers", 2, "--", "--pause", 0.3, "--every", 5)
    pool.becomes(job, lambda job: job["iteration"] >= 3)
    assert pool.run("pause", job).status == 0
    pool.becomes(job, lambda job: job["state"] == "paused" and not job["workers"])
    assert pool.run("resume", job).status == 0
    assert pool.completed(job)["params_sha256"] == undisturbed


def test_what_workers_print_can_be_followed_to_the_end(pool: UpPool, train: Path, undisturbed: str) -> None:
    job = pool.submit(train, "--max-workers", 1, "--", "--pause", 0.05)
    followed = pool.run("logs", job, "-f")
    assert followed.status == 0
    assert "script starts" in followed.out
    assert f"sha {undisturbed}" in followed.out
    assert followed.out.count("first iteration") == 1
    assert f"job.{job}.completed" in pool.run("events", job).out


def test_what_workers_write_to_their_output_folder_can_be_fetched(pool: UpPool, tmp_path: Path) -> None:
    script = tmp_path / "notes.py"
    note = 'import os, pathlib\npathlib.Path(os.environ["RESILE_OUTPUT_DIR"], "notes.txt").write_text("done")\n'
    script.write_text(TRAIN + note)
    job = pool.submit(script, "--max-workers", 1)
    pool.completed(job)
    fetched = pool.run("output", job, "-o", tmp_path / "results")
    assert fetched.status == 0, fetched.err
    assert [file.read_text() for file in (tmp_path / "results").rglob("notes.txt")] == ["done"]


def test_a_failed_job_says_why(pool: UpPool, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise ValueError('no data')\n")
    job = pool.submit(script)
    waited = pool.run("wait", job)
    assert waited.status == 1
    assert "ValueError: no data" in waited.last_error
    assert "ValueError: no data" in pool.run("job", job).out
    logs = pool.run("logs", job, "-f").out
    assert "Traceback (most recent call last):" in logs
    assert "ValueError: no data" in logs


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        (("--min-workers", 40), "waiting for hosts: its minimum is 40 and it can have at most 8"),
        (("--group", "gpu=h100"), "waiting for a host with the labels gpu=h100: none of those that are up has them"),
    ],
)
def test_a_job_that_no_host_can_run_is_accepted_with_a_warning(
    pool: UpPool, train: Path, wish: tuple[str | int, ...], reason: str
) -> None:
    submitted = pool.run("submit", train, *wish)
    job = submitted.out.strip()
    assert submitted.status == 0
    assert submitted.last_error == f"{job} is {reason}"
    assert pool.run("stop", job).status == 0


def test_a_drained_host_hands_its_job_over_and_takes_others_when_it_is_undrained(
    pool: UpPool, train: Path, undisturbed: str, until: Callable[..., None]
) -> None:
    def state(host: str) -> str:
        (found,) = (known["state"] for known in pool.ask("hosts")["hosts"] if known["id"] == host)
        return str(found)

    job = pool.submit(train, "--max-workers", 1, "--", "--pause", 0.3)
    (slot,) = pool.becomes(job, lambda job: job["iteration"] >= 1)["slots"]
    host = slot.partition("/")[0]
    assert pool.run("drain", host).status == 0
    pool.becomes(job, lambda job: job["state"] == "running" and job["slots"] and not job["slots"][0].startswith(host))
    assert state(host) == "draining"
    assert pool.completed(job)["params_sha256"] == undisturbed
    pool.service(f"hosts/{host}").kill()
    until(lambda: pool.run("hosts").out.count("still drained") == 1)
    assert pool.run("undrain", host).status == 0
    assert state(host) == "up"
    until(lambda: not pool.zombies())


@pytest.mark.parametrize(
    "module",
    [
        "nats-server",
        pytest.param("resile_scheduler", marks=pytest.mark.nightly),
        pytest.param("resile_monitor", marks=pytest.mark.nightly),
    ],
)
def test_what_dies_is_started_again_and_the_job_goes_on(
    module: str, pool: UpPool, train: Path, undisturbed: str, until: Callable[..., None]
) -> None:
    job = pool.submit(train, "--max-workers", 2, "--", "--pause", 0.1)
    pool.becomes(job, lambda job: job["iteration"] >= 1)
    victim = pool.service(module)
    victim.kill()
    assert pool.completed(job)["params_sha256"] == undisturbed
    until(lambda: pool.service(module).pid != victim.pid)


def test_a_second_pool_in_a_home_is_refused(pool: UpPool, resile: Resile) -> None:
    refused = resile.run("up", "--home", pool.home)
    assert refused.status == 2
    assert f"a pool is already running in {pool.home} at {pool.ready['url']}" in refused.last_error


def test_a_port_in_use_is_named(resile: Resile) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = resile.run("up", "--port", port)
    assert refused.status == 2
    assert refused.last_error == (f"resile: port {port} of 127.0.0.1 is in use: choose another with --port")


def test_storage_that_cannot_be_used_is_said_at_once(resile: Resile) -> None:
    refused = resile.run("up", "--storage", "nonsense")
    assert refused.status == 2
    assert "use file:///folder, s3://bucket/folder" in refused.last_error


def test_whatever_ends_a_pool_nothing_is_left_and_the_next_one_carries_on(
    tmp_path: Path, train: Path, undisturbed: str, until: Callable[..., None]
) -> None:
    home = tmp_path / "home"
    with pool_up(home, "--slots", 2) as pool:
        job = pool.submit(train, "--max-workers", 1, "--", "--pause", 0.2)
        pool.becomes(job, lambda job: job["iteration"] >= 2)
        ended = pool.end(signal.SIGINT)
    assert (ended.status, ended.err.splitlines()) == (
        0,
        [
            "stopping: all jobs are saved first; press Ctrl-C again to stop at once",
            "saving 1 job (job-1)",
            "the pool has stopped",
        ],
    )
    assert not pool.left()
    assert "no pool is running" in pool.run("jobs").last_error

    with pool_up(home, "--hosts", 2, "--slots", 1) as second:
        assert second.ready["url"] == pool.ready["url"]
        view = second.completed(job)
        assert view["params_sha256"] == undisturbed
        assert "suspending" in [item["kind"] for item in view["history"]]
        running = second.submit(train, "--", "--pause", 0.6, "--every", 3)
        waiting = second.submit(train, "--min-workers", 2)
        second.becomes(running, lambda job: job["workers"] == 2 and job["checkpoint"])
        second.end(signal.SIGKILL)
    until(lambda: not second.left())

    with pool_up(home, "--hosts", 2, "--slots", 1, "--detection-seconds", 2) as third:
        view = third.completed(running)
        assert view["params_sha256"] == undisturbed, "everything was killed at once, and nobody asked for it again"
        assert any("it starts again from the checkpoint of iteration" in item["reason"] for item in view["history"])
        assert third.completed(waiting)["params_sha256"] == undisturbed


def test_a_second_ctrl_c_ends_it_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    with pool_up(tmp_path / "home", "--slots", 1) as pool:
        pool.service("resile_learner").suspend()  # it cannot hear that it is told to end
        pool.process.send_signal(signal.SIGINT)
        assert pool.process.stderr is not None
        assert "all jobs are saved first" in pool.process.stderr.readline()
        time.sleep(2 * ONE_SIGNAL_SECONDS)
        assert pool.end(signal.SIGINT).status == 130
    assert not pool.left()


def test_a_drain_ends_at_its_deadline_what_has_not_left_and_the_job_recovers(
    pool: UpPool, tmp_path: Path, undisturbed: str
) -> None:
    slow = "time.sleep(12 if iteration.number == 5 else options.pause)"
    assert "time.sleep(options.pause)" in TRAIN
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace("time.sleep(options.pause)", slow))
    job = pool.submit(script, "--max-workers", 6, "--", "--shards", 6)
    view = pool.becomes(job, lambda job: job["workers"] == 6 and job["iteration"] > 0)
    host = view["history"][-1]["slots"][-1].partition("/")[0]
    assert pool.run("drain", host, "--deadline", 1).status == 0
    view = pool.becomes(job, lambda job: job["workers"] < 6)
    (recovery,) = [item for item in view["history"] if "drain deadline" in item["reason"]]
    assert recovery["reason"] == f"{host} reached its drain deadline"
    assert not any(slot.startswith(f"{host}/") for slot in recovery["slots"])
    assert pool.completed(job)["params_sha256"] == undisturbed
