"""Workers run to their end: whatever happens to one, its messages come first and its exit last, exactly once."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from resile_learner.messages import FromWorker, WorkerConfig
from resile_learner.processes import worker_log as logs
from resile_learner.processes.client import ForkServerClient, ForkServerSettings
from resile_learner.processes.fork_servers import ForkServers
from resile_learner.processes.runner import WorkerRunner
from resile_learner.processes.worker_log import worker_log
from resile_learner.processes.worker_process import Stream
from resile_shared.errors import ResileError
from resile_shared.messages.hosts import WorkerExit
from resile_testing.waiting import until


class Recorder:
    """Records what workers do, in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.exits: dict[int, WorkerExit] = {}
        self.on_hello: Callable[[int], None] = lambda worker: None

    def on_message(self, job: str, message: FromWorker) -> None:
        self.seen.append(message.kind)
        self.on_hello(message.worker)

    def on_line(self, job: str, worker: int, stream: Stream, line: str) -> None:
        self.seen.append(f"{stream}: {line}")

    def on_log_error(self, job: str, worker: int, error: OSError) -> None:
        self.seen.append("log error")

    async def on_exit(self, job: str, worker: int, exit_: WorkerExit) -> None:
        assert worker not in self.exits
        self.exits[worker] = exit_


class Stage:
    """A runner whose workers act as named."""

    def __init__(self, fork_servers: ForkServers, folder: Path) -> None:
        self.recorder = Recorder()
        self.fork_servers = fork_servers
        self.runner = WorkerRunner(fork_servers, self.recorder)
        self.folder = folder

    async def prepare(self, worker: int, act: str) -> WorkerConfig:
        if act == "cannot be prepared":
            raise ResileError("its package\nis broken")
        if act == "meets a bug":
            raise ValueError("Invalid IPv6 URL")
        if act == "is being prepared":
            await asyncio.sleep(600)
        if act == "is prepared while the host ends":
            await self.fork_servers.close()
        return WorkerConfig(
            job="j",
            worker=worker,
            script="/none.py",
            args=(act,),
            directory=str(self.folder),
            storage="file:///none",
            environment=str(self.folder) if act == "is prepared while the host ends" else "",
        )

    def start(self, act: str, worker: int = 0) -> None:
        self.runner.start("j", worker, self.prepare(worker, act), log_folder=self.folder)

    async def play(self, act: str) -> WorkerExit:
        self.start(act)
        await until(lambda: 0 in self.recorder.exits)
        return self.recorder.exits[0]


@pytest_asyncio.fixture
async def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    settings = ForkServerSettings(entry="acting_workers:main", preload=())
    fork_server = await ForkServerClient.start(log=tmp_path / "fork-server.log", settings=settings)
    stage = Stage(ForkServers(fork_server, settings, logs=tmp_path), tmp_path)
    try:
        yield stage
    finally:
        await fork_server.close()
        await stage.runner.wait_closed()


async def test_messages_come_before_the_exit(stage: Stage) -> None:
    assert await stage.play("finishes") == WorkerExit(kind="finished")
    assert stage.recorder.seen == ["listening", "finished"]
    assert stage.runner.pids == {}


async def test_a_worker_that_runs_can_be_found_and_killed(stage: Stage) -> None:
    found: list[Any] = []

    def kill(worker: int) -> None:
        found.extend(stage.runner.pids)
        stage.runner.kill("j", worker)

    stage.recorder.on_hello = kill
    assert (await stage.play("waits")).kind == "killed"
    assert found == [("j", 0)]


@pytest.mark.parametrize("act", ["mumbles", "signs_as_another"])
async def test_a_worker_that_sends_a_malformed_message_is_killed_and_has_failed(stage: Stage, act: str) -> None:
    exit_ = await stage.play(act)
    assert (exit_.kind, exit_.status) == ("failed", -9)
    assert exit_.message.startswith("worker 0 sent a malformed message: ")


async def test_a_worker_that_sends_without_end_lets_the_host_do_something_else_after_each_message(
    stage: Stage,
) -> None:
    turns = 0
    seen = []

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    stage.recorder.on_hello = lambda worker: seen.append(turns)
    counting = asyncio.create_task(count())
    await stage.play("floods")
    counting.cancel()
    assert len(seen) == len(set(seen)) > 500


async def test_a_worker_that_cannot_be_prepared_is_not_started(stage: Stage) -> None:
    assert await stage.play("cannot be prepared") == WorkerExit(kind="not started", message="its package is broken")


async def test_no_error_of_a_preparation_ends_the_host(stage: Stage) -> None:
    exit_ = await stage.play("meets a bug")
    assert exit_ == WorkerExit(kind="not started", message="its preparation failed: Invalid IPv6 URL")
    assert not stage.runner.fault.done()


async def test_a_worker_that_is_prepared_while_the_host_ends_is_not_started(stage: Stage) -> None:
    exit_ = await stage.play("is prepared while the host ends")
    assert exit_ == WorkerExit(kind="not started", message="this host ends its workers")


async def test_the_start_of_a_worker_can_be_cancelled(stage: Stage) -> None:
    stage.start("is being prepared")
    await asyncio.sleep(0)
    assert stage.runner.workers == {("j", 0)}
    stage.runner.kill("j", 0)
    await until(lambda: 0 in stage.recorder.exits)
    assert stage.runner.workers == set()
    assert stage.recorder.exits[0].kind == "not started"


async def test_a_worker_that_is_killed_while_it_is_forked_does_not_stay(stage: Stage) -> None:
    config = await stage.prepare(0, "waits")

    async def prepare() -> WorkerConfig:
        asyncio.get_running_loop().call_soon(lambda: asyncio.get_running_loop().call_soon(stage.runner.kill, "j", 0))
        return config

    stage.runner.start("j", 0, prepare(), log_folder=stage.folder)
    await until(lambda: 0 in stage.recorder.exits)
    assert stage.recorder.exits[0].kind == "killed"


async def test_what_workers_print_is_kept_and_delivered(stage: Stage) -> None:
    await stage.play("prints")
    log = (stage.folder / "worker-0.log").read_text().splitlines()
    assert sorted(log) == sorted(line.partition(": ")[2] for line in stage.recorder.seen)
    assert "stderr: to stderr" in stage.recorder.seen


async def test_of_workers_that_ended_the_newest_logs_are_kept(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_ENDED_LOGS", 3)
    for worker in (0, 2, 9, 10, 11):
        (stage.folder / f"worker-{worker}.log").touch()
    stage.start("waits", worker=1)
    await until(lambda: "listening" in stage.recorder.seen)
    stage.start("prints", worker=12)
    await until(lambda: 12 in stage.recorder.exits)
    stage.runner.kill("j", 1)
    await until(lambda: 1 in stage.recorder.exits)
    left = {int(path.stem.removeprefix("worker-")) for path in stage.folder.glob("worker-*.log")}
    assert left == {1, 9, 10, 11, 12}


def test_the_logs_of_workers_that_ended_are_limited_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_ENDED_BYTES", 25)
    for worker in range(4):
        (tmp_path / f"worker-{worker}.log").write_bytes(b"x" * 10)
    with worker_log(tmp_path, 4, running={0, 4}):
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"worker-{worker}.log" for worker in (0, 2, 3, 4)]


async def test_a_log_that_cannot_be_written_is_reported_once_and_lines_are_still_delivered(stage: Stage) -> None:
    (stage.folder / "worker-0.log").symlink_to("/dev/full")
    await stage.play("prints")
    assert stage.recorder.seen.count("log error") == 1
    assert "stderr: to stderr" in stage.recorder.seen


async def test_an_error_of_the_observer_surfaces(stage: Stage) -> None:
    def fail(worker: int) -> None:
        raise AssertionError("a bug")

    stage.recorder.on_hello = fail
    stage.start("finishes")
    with pytest.raises(AssertionError, match="a bug"):
        await stage.runner.fault
