"""The warm process itself: what it loads, that it stays single-threaded, and that nothing outlives its agent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from resile_learner.messages import WorkerConfig
from resile_learner.processes.client import ForkServerClient
from resile_testing.waiting import PATIENCE_SECONDS

AGENT = """
import asyncio, os, signal, sys
from pathlib import Path
from resile_learner.processes.client import ForkServerClient, ForkServerSettings
from resile_learner.messages import WorkerConfig

async def main():
    settings = ForkServerSettings("acting_workers:main", ())
    fork_server = await ForkServerClient.start(log=Path(sys.argv[1]) / "log", settings=settings)
    print("fork-server", fork_server.pid, flush=True)
    config = WorkerConfig(
        job="j", worker=0, script="/none.py", args=("starts_processes",), directory="/", storage="file:///none"
    )
    process = await fork_server.fork(config, lambda stream, line: print(line, flush=True))
    {trick}
    await process.wait()

asyncio.run(main())
"""


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "subprocess.Popen[str]":
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return start_agent(tmp_path)


def start_agent(folder: Path, trick: str = "") -> "subprocess.Popen[str]":
    code = AGENT.replace("{trick}", trick)
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)


def read_pids(agent: "subprocess.Popen[str]") -> tuple[list[int], str]:
    """Process ids of the fork server, the worker and what the worker started; the name of its shared memory."""
    assert agent.stdout is not None
    fork_server = int(agent.stdout.readline().split()[1])
    *pids, memory = agent.stdout.readline().split()
    return [fork_server, *map(int, pids)], memory


def all_gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(psutil.pid_exists(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_agent(agent: "subprocess.Popen[str]", number: signal.Signals) -> None:
    pids, memory = read_pids(agent)
    scratch = psutil.Process(pids[2]).environ()["TMPDIR"]
    assert len(pids) == 5
    agent.send_signal(number)
    agent.wait()
    assert all_gone(pids)
    assert not Path(f"/dev/shm/{memory}").exists()
    assert not Path(scratch).exists()


def test_a_copy_of_the_agents_socket_does_not_keep_it_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    agent = start_agent(tmp_path, trick="copy = os.fork() or signal.pause(); print(copy, flush=True)")
    assert agent.stdout is not None
    fork_server, copy = agent.stdout.readline(), int(agent.stdout.readline())
    pids = [int(fork_server.split()[1]), *map(int, agent.stdout.readline().split()[:-1])]
    agent.kill()
    agent.wait()
    try:
        assert all_gone(pids)
    finally:
        os.kill(copy, signal.SIGKILL)


def test_the_workers_die_even_if_the_fork_server_is_killed(agent: "subprocess.Popen[str]") -> None:
    pids, _ = read_pids(agent)
    os.kill(pids[0], signal.SIGKILL)
    assert all_gone(pids[:3]), "the kernel kills the worker, the client its child"
    agent.wait()
    for pid in pids[3:]:
        os.kill(pid, signal.SIGKILL)


def test_during_the_imports_it_dies_at_once(tmp_path: Path) -> None:
    code = AGENT.replace('ForkServerSettings("acting_workers:main", ())', "ForkServerSettings()").replace("{trick}", "")
    agent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    fork_server = int(agent.stdout.readline().split()[1])
    agent.kill()
    agent.wait()
    assert all_gone([fork_server])


async def test_it_loads_what_training_needs_and_stays_single_threaded(tmp_path: Path) -> None:
    fork_server = await ForkServerClient.start(log=tmp_path / "log")
    try:
        await fork_server.loaded()
        assert len(os.listdir(f"/proc/{fork_server.pid}/task")) == 1
        assert (tmp_path / "log").read_text() == ""
        script = tmp_path / "script.py"
        script.write_text(
            "import gc, sys\n"
            "print([name for name in ('torch', 'torch._dynamo') if name in sys.modules], gc.isenabled(), sep=';')\n"
        )
        config = WorkerConfig(job="j", worker=0, script=str(script), directory=str(tmp_path), storage="file:///none")
        lines: list[str] = []
        process = await fork_server.fork(config, lambda stream, line: lines.append(line))
        said = [message async for message in process.messages()]
        await process.wait()
        assert lines[0].strip() == "['torch', 'torch._dynamo'];True", "with a collector, which rests during imports"
        assert said[0].kind == "listening"
    finally:
        await fork_server.close()


def test_threads_that_an_import_starts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "threading_module.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parent}")
    code = AGENT.replace('"acting_workers:main", ()', '"acting_workers:main", ("threading_module",)')
    code = code.replace("{trick}", "print((await process.wait()).describe('worker 0'))")
    output = subprocess.check_output([sys.executable, "-c", code, str(tmp_path)], text=True)
    assert "an import left 2 threads running" in output


def test_a_script_loads_no_other_modules_of_the_learner_than_the_fork_server_has() -> None:
    """After an upgrade under a running pool they would be of another version than those that it has."""
    program = (
        "import sys\n"
        "from importlib import import_module\n"
        "from resile_learner.processes.fork_server import DEFAULT_ENTRY, PRELOAD\n"
        "for name in (*PRELOAD, DEFAULT_ENTRY.partition(':')[0]):\n"
        "    import_module(name)\n"
        "before = set(sys.modules)\n"
        "import resile.training\n"
        "print(*sorted(name for name in set(sys.modules) - before if not name.startswith('resile.')))\n"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == ["resile"]
