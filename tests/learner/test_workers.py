"""Workers forked from a real fork server: what they are given, what they send, and how their exits are classified."""

import ast
import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import uvloop

from resile_learner.messages import (
    Failed,
    Finished,
    Left,
    Member,
    Order,
    Pause,
    Trained,
    WorkerConfig,
    WorkerListening,
    encode,
)
from resile_learner.processes import exits
from resile_learner.processes.client import ForkServerClient, ForkServerSettings
from resile_learner.processes.exits import OutOfMemoryKills, classify
from resile_learner.processes.worker_process import MalformedMessageError, WorkerProcess
from resile_shared.errors import ResileError
from resile_shared.messages.hosts import AFTER_TRAINING, WorkerExit
from resile_testing.control_groups import limited_group
from resile_testing.waiting import PATIENCE_SECONDS

Start = Callable[..., Any]


class Stage:
    """A fork server whose workers act, and what they printed."""

    def __init__(self, fork_server: ForkServerClient, folder: Path) -> None:
        self.fork_server = fork_server
        self.folder = folder
        self.printed: list[tuple[int, str, str]] = []
        self._next = 0

    async def start(self, *act: str, **config: Any) -> WorkerProcess:
        worker, self._next = self._next, self._next + 1
        settings = {
            "job": "job-1",
            "worker": worker,
            "script": "/none.py",
            "args": act,
            "directory": str(self.folder),
            "storage": "file:///none",
            **config,
        }
        return await self.fork_server.fork(
            WorkerConfig(**settings), lambda stream, line: self.printed.append((worker, stream, line))
        )

    async def play(self, *act: str, **config: Any) -> tuple[list[Any], WorkerExit]:
        process = await self.start(*act, **config)
        said = [message async for message in process.messages()]
        return said, await process.wait()

    def lines(self, stream: str = "stdout") -> list[str]:
        return [line for _, of, line in self.printed if of == stream]

    async def until_printed(self, count: int = 1) -> None:
        await until(lambda: len(self.printed) >= count)


@pytest_asyncio.fixture
async def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    fork_server = await ForkServerClient.start(
        log=tmp_path / "fork-server.log", settings=ForkServerSettings(entry="acting_workers:main", preload=())
    )
    try:
        yield Stage(fork_server, tmp_path)
    finally:
        await fork_server.close()
        assert not psutil.pid_exists(fork_server.pid)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another process brings about."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_each_kind_of_exit_is_classified(stage: Stage) -> None:
    ends = {}
    for act in ("finishes", "leaves", "fails", "exits", "exits_with_words", "raises", "crashes"):
        _, exit_ = await stage.play(act)
        ends[act] = (exit_.kind, exit_.status)
    assert ends == {
        "finishes": ("finished", 0),
        "leaves": ("left", 0),
        "fails": ("failed", 1),
        "exits": ("exited", 7),
        "exits_with_words": ("exited", 1),
        "raises": ("exited", 1),
        "crashes": ("killed", -signal.SIGSEGV),
    }
    assert any("RuntimeError: unforeseen" in line for line in stage.lines("stderr"))


async def test_all_messages_come_before_the_exit(stage: Stage) -> None:
    said, exit_ = await stage.play("finishes")
    assert said == [WorkerListening(worker=0, host="127.0.0.1", port=1), Finished(worker=0)]
    assert exit_ == WorkerExit(kind="finished")


async def test_a_failure_keeps_the_workers_message_and_details(stage: Stage) -> None:
    _, exit_ = await stage.play("fails")
    assert exit_.describe("worker 0") == "worker 0 failed: it went wrong"
    assert exit_.details == "where"


async def test_a_killed_worker_is_reported_with_its_signal(stage: Stage) -> None:
    process = await stage.start("waits")
    async for _ in process.messages():
        process.kill()
    assert (await process.wait()).describe("worker 0") == "worker 0 was killed by SIGKILL (Killed)"


async def test_the_error_for_a_malformed_message_names_its_worker(stage: Stage) -> None:
    for act, fault in (("mumbles", "worker 0 sent a malformed message"), ("signs_as_another", "signed as worker 2")):
        process = await stage.start(act)
        with pytest.raises(MalformedMessageError, match=fault):
            [message async for message in process.messages()]
        process.kill()
        await process.wait()


async def test_an_order_reaches_the_worker(stage: Stage) -> None:
    process = await stage.start("echoes_an_order")
    members = (Member(worker=0, host="h", port=1),)
    process.send(Order(job="j", generation=3, members=members, secret="top"))
    await process.wait()
    assert stage.lines() == ["3 top"]


async def test_what_workers_print_comes_line_by_line(stage: Stage) -> None:
    await stage.play("prints")
    stdout = stage.lines()
    assert stdout[:3] == ["to stdout, at once", "not \ufffd utf-8", "100%"]
    assert stdout[3].endswith(" [... cut]")
    assert len(stdout[3]) < 100_000
    assert stdout[4:] == ["no newline at the end"]
    assert stage.lines("stderr") == ["to stderr"]


async def test_a_worker_starts_with_the_right_descriptors_environment_and_signals(stage: Stage) -> None:
    before = time.time()
    await stage.play("describes_itself", env={"COLOR": "red"})
    facts = ast.literal_eval(stage.lines()[0])
    ((own, name),) = facts["files in memory"].items()
    assert "resile-worker:job-1/0" in name
    assert facts["descriptors"] == sorted([0, 1, 2, own, facts["agent"]])
    assert facts["stdin"] == "/dev/null"
    assert facts["directory"] == str(stage.folder)
    assert facts["color"] == "red"
    assert facts["hash_seed"] == "0"
    assert facts["leads_session"]
    assert facts["threads"] == 1
    assert facts["caught"] == 0
    assert facts["ignored"] & (1 << (signal.SIGINT - 1))
    assert not facts["ignored"] & (1 << (signal.SIGTERM - 1))
    assert before <= facts["time"]


async def test_strings_hash_alike_in_every_worker(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    await stage.play("describes_itself")
    await stage.play("describes_itself")
    one, other = (ast.literal_eval(line) for line in stage.lines())
    assert one["hash"] == other["hash"]


async def test_long_arguments_fit(stage: Stage) -> None:
    _, exit_ = await stage.play("finishes", "x" * 1_000_000)
    assert exit_.kind == "finished"


async def test_what_a_worker_started_ends_with_it(stage: Stage) -> None:
    await stage.play("starts_processes", "and-exits")
    _, child, _, _, memory_name = stage.lines()[0].split()
    await until(lambda: not psutil.pid_exists(int(child)))
    await until(lambda: memory_name not in os.listdir("/dev/shm"))


@pytest.mark.parametrize("how", ["plainly", "lets-go"])
async def test_a_daemon_ends_with_its_worker_and_with_no_other(stage: Stage, how: str) -> None:
    other = await stage.start("starts_processes")
    await stage.until_printed()
    others = [int(pid) for pid in stage.lines()[0].split()[:-1]]
    _, exit_ = await stage.play("leaves_a_daemon", how)
    assert exit_.kind == "exited"
    assert not is_alive(int(stage.lines()[1]))
    assert all(map(is_alive, others))
    other.kill()
    await other.wait()
    assert not any(map(is_alive, others))


async def test_a_daemon_that_calls_itself_a_janitor_ends_too(stage: Stage) -> None:
    await stage.play("leaves_a_daemon", "disguised")
    await until(lambda: not is_alive(int(stage.lines()[0])))


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_closing_ends_everything_that_workers_started(stage: Stage) -> None:
    process = await stage.start("starts_processes")
    await stage.until_printed()
    *pids, memory_name = stage.lines()[0].split()
    assert len(pids) == 4
    await stage.fork_server.close()
    assert not any(psutil.pid_exists(int(pid)) for pid in pids)
    assert memory_name not in os.listdir("/dev/shm")
    assert (await process.wait()).kind == "abandoned"


async def test_a_process_of_the_user_that_holds_the_pipes_does_not_delay_the_exit(stage: Stage) -> None:
    _, exit_ = await stage.play("starts_stubborn_process")
    assert exit_ == WorkerExit(kind="exited")
    assert stage.lines()


async def test_a_fork_server_that_dies_takes_its_workers_along(stage: Stage) -> None:
    process = await stage.start("waits")
    async for _ in process.messages():
        os.kill(stage.fork_server.pid, signal.SIGKILL)
    exit_ = await process.wait()
    assert exit_.kind == "orphaned"
    assert process.pid is not None
    await until(lambda: not psutil.pid_exists(process.pid))
    later = await stage.start("waits")
    assert (await later.wait()).kind == "orphaned"


async def test_many_workers_at_once(stage: Stage) -> None:
    ends = await asyncio.gather(*(stage.play("finishes") for _ in range(20)))
    assert {exit_.kind for _, exit_ in ends} == {"finished"}


async def test_a_failed_import_is_reported(tmp_path: Path) -> None:
    settings = ForkServerSettings(preload=("resile_no_such_module",))
    fork_server = await ForkServerClient.start(log=tmp_path / "log", settings=settings)
    config = WorkerConfig(job="j", worker=0, script="/none.py", directory="/", storage="file:///none")
    process = await fork_server.fork(config, lambda stream, line: None)
    exit_ = await process.wait()
    await fork_server.close()
    assert "could not be imported: ModuleNotFoundError: No module named 'resile_no_such_module'" in exit_.message
    assert "Traceback" in exit_.details


async def test_a_fork_server_that_dies_during_its_imports_is_reported(tmp_path: Path) -> None:
    fork_server = await ForkServerClient.start(log=tmp_path / "log")
    config = WorkerConfig(job="j", worker=0, script="/none.py", directory="/", storage="file:///none")
    process = await fork_server.fork(config, lambda stream, line: None)
    os.kill(fork_server.pid, signal.SIGKILL)
    exit_ = await process.wait()
    await fork_server.close()
    assert exit_.describe("worker 0") == (
        "worker 0 could not be started: during its imports the fork server was killed by SIGKILL (Killed)"
    )


async def test_how_workers_ended_is_known_if_the_fork_server_ends_before_it_is_read(stage: Stage) -> None:
    await stage.fork_server.loaded()
    processes = [await stage.start("exits") for _ in range(5)]
    block_until_idle(stage.fork_server.pid)
    os.kill(stage.fork_server.pid, signal.SIGKILL)
    block_until_ended(stage.fork_server.pid)
    assert [(await process.wait()).describe("it") for process in processes] == [
        "it ended its process with exit status 7"
    ] * 5


async def test_a_worker_that_kills_its_fork_server_is_orphaned_whatever_it_has_reported(stage: Stage) -> None:
    ends = []
    for act in ("finishes_and_kills_fork_server", "fails_and_kills_fork_server"):
        fork_server = await ForkServerClient.start(
            log=stage.folder / "log", settings=ForkServerSettings(entry="acting_workers:main", preload=())
        )
        _, exit_ = await Stage(fork_server, stage.folder).play(act)
        ends.append(exit_.kind)
        await fork_server.close()
    assert ends == ["orphaned", "orphaned"]  # or its death would not count against the job


async def test_a_failed_import_is_reported_if_the_fork_server_ends_before_it_is_read(tmp_path: Path) -> None:
    settings = ForkServerSettings(preload=("resile_no_such_module",))
    fork_server = await ForkServerClient.start(log=tmp_path / "log", settings=settings)
    ended = asyncio.create_task(fork_server.ended())
    await asyncio.sleep(0)
    block_until_ended(fork_server.pid)
    await ended
    with pytest.raises(ResileError, match="could not be imported: ModuleNotFoundError: No module named 'resile_no"):
        await fork_server.loaded()
    await fork_server.close()


async def test_a_workers_process_id_is_known_before_its_first_message_is_handled() -> None:
    descriptors, process = await WorkerProcess.connect(0, lambda stream, line: None, lambda: None)
    for descriptor in descriptors[1:]:
        os.close(descriptor)
    with socket.socket(fileno=descriptors[0]) as worker:
        worker.sendall(encode(Finished(worker=0)))
        first = asyncio.ensure_future(anext(process.messages()))
        await asyncio.sleep(0.05)
        assert not first.done()
        process.forked(77)
        assert await first == Finished(worker=0)
        assert process.running_pid == 77
    process.ended(WorkerExit(kind="abandoned"))
    assert process.running_pid is None
    await process.wait()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("is_late", [False, True])
def test_what_a_worker_said_last_is_read_though_it_ended_before_it_read_what_was_sent(
    loop: Callable[[], asyncio.AbstractEventLoop], *, is_late: bool
) -> None:
    """Its end resets the connection if something is unread in it, and breaks it for what is sent later."""

    async def work() -> None:
        descriptors, process = await WorkerProcess.connect(0, lambda stream, line: None, lambda: None)
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        with socket.socket(fileno=descriptors[0]) as worker:
            worker.sendall(encode(Trained(worker=0)))
            if not is_late:
                process.send(Pause(lineage=1))
        process.send(Pause(lineage=2))
        process.forked(77)
        for _ in range(10):  # all that can arrive has arrived before anybody reads
            await asyncio.sleep(0.01)
        assert [message async for message in process.messages()] == [Trained(worker=0)]
        process.exited(3, OutOfMemoryKills())
        assert (await process.wait()).message == AFTER_TRAINING

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(work())


def block_until_idle(fork_server: int) -> None:
    """Wait, without reading anything, until the fork server has reported the end of all its workers.

    It sleeps once it has forked all workers that were requested; then those that have not been reaped are its children.
    It sleeps again once it has reported those that were.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    process = psutil.Process(fork_server)

    def is_asleep() -> bool:
        return process.status() == psutil.STATUS_SLEEPING

    while not (is_asleep() and not process.children() and is_asleep()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def block_until_ended(fork_server: int) -> None:
    """Wait until it has ended, before the event loop sees anything of it."""
    os.waitid(os.P_PID, fork_server, os.WEXITED | os.WNOWAIT)


def test_a_kill_for_memory_is_distinguished_from_any_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    monkeypatch.setattr(exits, "own_folders", lambda _: [tmp_path])
    events.write_text("low 0\noom 3\noom_kill 3\n")
    kills = exits.OutOfMemoryKills()
    assert not kills.claim()
    events.write_text("low 0\noom 4\noom_kill 4\n")
    assert kills.claim()
    assert not kills.claim(), "one such kill explains one death"


@pytest.mark.skipif(os.geteuid() != 0, reason="control groups need root")
def test_a_kill_for_memory_counts_in_its_own_group_alone() -> None:
    watch = (
        "from resile_learner.processes.exits import OutOfMemoryKills\n"
        "kills = OutOfMemoryKills()\n"
        "print('watching', flush=True)\n"
        "input()\n"
        "print(kills.claim(), kills.claim())\n"
    )
    take_too_much = (
        "import os\n"
        "if not (child := os.fork()):\n"
        "    open('/proc/self/oom_score_adj', 'w').write('1000')\n"
        "    bytearray(1 << 30)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    with ExitStack() as stack:
        here, elsewhere = (stack.enter_context(limited_group("memory", size << 20)) for size in (200, 1000))
        watchers = [
            stack.enter_context(
                subprocess.Popen(
                    [*group, sys.executable, "-c", watch], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            for group in (here, elsewhere)
        ]
        assert [watcher.stdout and watcher.stdout.readline() for watcher in watchers] == 2 * ["watching\n"]
        assert subprocess.check_output([*here, sys.executable, "-c", take_too_much], text=True) == "-9\n"
        said = [watcher.communicate("\n")[0] for watcher in watchers]
    assert said == ["True False\n", "False False\n"]


@pytest.mark.parametrize(
    ("status", "last_message", "memory_ran_out", "kind"),
    [
        (0, Finished(worker=1), False, "finished"),
        (1, Finished(worker=1), False, "finished"),
        (0, Left(worker=1, generation=1, iteration=1), False, "left"),
        (1, Failed(worker=1, message="m"), False, "failed"),
        (-9, Failed(worker=1, message="m"), False, "failed"),
        (1, Failed(worker=1, message="m", is_state_lost=True), False, "abandoned"),
        (-9, None, True, "out of memory"),
        (-11, Finished(worker=1), False, "finished"),
        (-15, None, True, "killed"),
        (0, None, False, "exited"),
        (0, Trained(worker=1), False, "finished"),
        (3, Trained(worker=1), False, "exited"),
        (-9, Trained(worker=1), False, "killed"),
    ],
)
def test_exits_are_classified(status: int, last_message: Any, memory_ran_out: bool, kind: str) -> None:
    assert classify(status, last_message, memory_ran_out=memory_ran_out).kind == kind


def test_an_exit_is_described_in_one_line_for_the_user() -> None:
    killed = WorkerExit(kind="killed", status=-signal.SIGSEGV)
    assert killed.describe("worker 3 on host-1/2") == "worker 3 on host-1/2 was killed by SIGSEGV (Segmentation fault)"
    exited = WorkerExit(kind="exited", status=4)
    assert exited.describe("worker 3") == "worker 3 ended its process with exit status 4"
    later = classify(4, Trained(worker=3), memory_ran_out=False)
    assert later.describe("worker 3") == "worker 3 ended its process with exit status 4, after training was complete"
    out_of_memory = WorkerExit(kind="out of memory", status=-signal.SIGKILL)
    assert out_of_memory.describe("worker 3").startswith("worker 3 was killed because memory ran out")
