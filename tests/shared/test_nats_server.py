import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from resile_shared.bus.connection import BusRefused, Connection
from resile_shared.bus.credentials import Credentials, read_credentials
from resile_shared.bus.nats_server import NatsServer
from resile_shared.bus.roles import ROLES
from resile_shared.errors import ResileError, UsageError
from resile_testing.fixtures import Pool
from resile_testing.waiting import PATIENCE_SECONDS


def test_secrets_are_readable_by_their_owner_alone(pool: Pool) -> None:
    files = [pool.server.credentials(role) for role in ROLES] + [pool.server.folder / "nats-server.conf"]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert len({read_credentials(pool.server.credentials(role)).password for role in ROLES}) == len(ROLES)


async def test_port_and_passwords_outlive_a_restart(pool: Pool) -> None:
    before = read_credentials(pool.server.credentials("monitor"))
    await pool.server.stop()
    await pool.server.start()
    assert read_credentials(pool.server.credentials("monitor")) == before


async def test_the_next_server_in_a_folder_takes_the_same_port_if_it_is_free(tmp_path: Path) -> None:
    first, second, third = (NatsServer(tmp_path) for _ in range(3))
    await first.start()
    await first.stop()
    await second.start()
    await second.stop()
    assert second.port == first.port
    with socket.create_server(("127.0.0.1", first.port)):
        await third.start()
        await third.stop()
    assert third.port != first.port


async def test_a_server_that_listens_everywhere_is_reached_on_this_machine_by_loopback(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::1"):
        server = NatsServer(tmp_path / host.replace(":", "-"), host=host)
        await server.start()
        try:
            url = read_credentials(server.credentials("monitor")).url
            assert url.startswith("nats://127.0.0.1:" if host == "0.0.0.0" else "nats://[::1]:")
            await (await Connection.open(read_credentials(server.credentials("monitor")), name="test")).close()
        finally:
            await server.stop()


async def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} of 127.0.0.1 is in use"):
            await NatsServer(tmp_path / "bus", port=port).start()


async def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=f"{tmp_path}/file"):
        await NatsServer(tmp_path / "file").start()
    if os.getuid() != 0:
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(UsageError, match="closed"):
            await NatsServer(tmp_path / "closed").start()


async def test_a_second_server_in_a_folder_is_refused(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resile_shared.bus.nats_server.LOCK_SECONDS", 0.1)
    with pytest.raises(UsageError, match="another bus is running in"):
        await NatsServer(pool.server.folder).start()
    assert pool.server.process is not None
    assert pool.server.process.returncode is None


async def test_a_broken_store_is_reported(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    (tmp_path / "jetstream").touch()
    with pytest.raises(ResileError, match="nats-server did not start"):
        await server.start()


async def test_a_wrong_password_is_refused_at_once(pool: Pool) -> None:
    wrong = Credentials(url=pool.server.url, user="monitor", password="wrong")
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(BusRefused, match="rejects the user 'monitor'"):
            await Connection.open(wrong, name="test")


def test_credentials_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{}")
    for name in ("none.json", "broken.json"):
        with pytest.raises(UsageError, match=name):
            read_credentials(tmp_path / name)


PARENT = """
import asyncio, sys
from pathlib import Path
from resile_shared.bus.nats_server import NatsServer

async def main():
    server = NatsServer(Path(sys.argv[1]))
    await server.start()
    print(server.process.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_it_dies_with_its_parent_and_the_folder_is_free_again(tmp_path: Path) -> None:
    def start() -> tuple[subprocess.Popen[str], psutil.Process]:
        parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        return parent, psutil.Process(int(parent.stdout.readline()))

    for _ in range(2):
        parent, server = start()
        parent.kill()
        parent.communicate()
        psutil.wait_procs([server], timeout=10)
        assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
