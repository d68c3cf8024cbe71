"""One service as a process."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from resile.http_requests import Server
from resile.pool.joined import JoinedHost, JoinOptions
from resile.pool.process import ServiceProcess
from resile.pool.services import ServiceSpec
from resile_testing.waiting import block_until


async def test_a_service_that_exits_while_it_is_killed_is_no_error(tmp_path: Path) -> None:
    service = ServiceProcess(ServiceSpec("one", "module", (), tmp_path / "log", tmp_path / "health"))
    service.process = process = await asyncio.create_subprocess_exec("sleep", "60", start_new_session=True)
    os.kill(process.pid, signal.SIGKILL)
    block_until(
        lambda: not psutil.pid_exists(process.pid)
    )  # by the thread that waits for it; the event loop is not notified yet
    await service.kill()
    assert process.returncode == -signal.SIGKILL


async def test_a_machine_whose_agent_has_exited_drains_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine may have taken over the name of its host."""
    drained: list[str] = []

    async def drain(server: Server, name: str, **_: object) -> str:
        drained.append(name)
        return ""

    monkeypatch.setattr("resile.pool.joined.drain_host", drain)
    host = JoinedHost(JoinOptions(Server("http://127.0.0.1:1", "token"), "x"), home=tmp_path, log=print)
    host._agent = agent = ServiceProcess(ServiceSpec("x", "module", (), tmp_path / "log", tmp_path / "health"))
    agent.process = await asyncio.create_subprocess_exec("sleep", "60", start_new_session=True)
    await host._drain()
    assert drained == ["x"]
    await agent.kill()
    await host._drain()
    assert drained == ["x"]
