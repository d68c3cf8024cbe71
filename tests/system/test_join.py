"""A machine, here a network namespace, joins a running pool, trains with it, and leaves."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from resile.client import AsyncClient, find_server
from resile.pool.namespaces import Namespaces
from resile_shared.messages.hosts import HostState

from .conftest import Ended
from .paced import host_becomes
from .pools import UpPool, pool_up
from .trials import trying

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]


@pytest.fixture
def network() -> Iterator[Namespaces]:
    """Another machine, with a cable to this one."""
    network = Namespaces.create(["elsewhere"])
    yield network
    network.remove()


class Joiner:
    """Runs `resile host` on the other machine, or on the machine of the pool."""

    def __init__(self, network: Namespaces, pool: UpPool, *, is_elsewhere: bool = True) -> None:
        url = json.loads((pool.home / "pool.json").read_bytes())["url"]
        self._inside = (*(network.enter("elsewhere") if is_elsewhere else ()), sys.executable, "-m", "resile")
        self._join = ("host", "--join", url, "--token-file", str(pool.home / "token"), "--slots", "1", "--json")

    def start(self, *options: object) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*self._inside, *self._join, *map(str, options)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    @contextmanager
    def joined(self, *options: object) -> Iterator["subprocess.Popen[str]"]:
        """Have the host in the pool; behind the block its process is gone."""
        process = self.start(*options)
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            assert ready, process.communicate()[1]
            assert json.loads(ready)["pid"] == process.pid
            yield process
        finally:
            process.kill()
            process.communicate()

    def refusal(self, *options: object) -> str:
        """Try to join in vain; return the one line that says why."""
        _, err = (process := self.start(*options)).communicate(timeout=120)
        assert process.returncode in (1, 2)
        (line,) = err.splitlines()
        return str(line)


def end(process: "subprocess.Popen[str]", number: signal.Signals, *, to_all: bool = False) -> Ended:
    """Send a signal, with ``to_all`` also to all that it has started, as systemd does; return how it ended."""
    below = psutil.Process(process.pid).children(recursive=True) if to_all else []
    for pid in (process.pid, *(each.pid for each in below)):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    out, err = process.communicate(timeout=120)
    return Ended(process.returncode, out, err)


def folder_of(path: Path) -> tuple[str, Path]:
    return ("--folder", path / "far")


async def test_a_machine_joins_trains_leaves_and_comes_back(
    network: Namespaces, trial_script: Path, trial_sha: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path)
    with pool_up(tmp_path / "home", "--listen", network.address, "--slots", 1) as pool:
        joiner = Joiner(network, pool)
        assert "a host named host-1 is already up" in joiner.refusal("--host", "host-1", *folder)
        elsewhere = ("--storage", (tmp_path / "nothing").as_uri())
        assert "is not the pool's storage on this machine: mount the shared folder" in joiner.refusal(*elsewhere)
        async with (
            AsyncClient(find_server(home=pool.home)) as client,
            trying(client, trial_script, tmp_path, num_hosts=2) as trial,
        ):
            with joiner.joined("--host", "far", "--label", "zone=b", *folder) as process:
                assert set((await trial.spreads()).slots) == {"host-1/0", "far/0"}
                far = await trial.host("far")
                assert (far.address, far.labels) == (network.part("elsewhere").address, {"zone": "b"})
                assert (tmp_path / "far" / "credentials.json").stat().st_mode & 0o777 == 0o600
                assert "a host named far is already up" in joiner.refusal(
                    "--host", "far", "--folder", tmp_path / "other"
                )
                health = (tmp_path / "far" / "health").read_text()
                assert "another `resile host` uses" in joiner.refusal("--host", "near", *folder)
                assert (tmp_path / "far" / "health").read_text() == health
                left = end(process, signal.SIGTERM)
            assert (left.status, left.err.splitlines()[-1]) == (0, "far has left the pool")
            await host_becomes(client, "far", lambda host: host.state is HostState.LEFT)
            await trial.goes_on(workers=1)

            with joiner.joined("--host", "far", *folder) as process:
                await trial.spreads()
                left = end(process, signal.SIGTERM, to_all=True)
            assert (left.status, left.err.splitlines()[-1]) == (0, "far has left the pool"), left.err
            await trial.goes_on(workers=1)

            with joiner.joined("--host", "far", *folder) as process:
                await trial.spreads()
                end(process, signal.SIGKILL)
            with joiner.joined("--host", "far", *folder):  # its name is not taken: it is its own
                await host_becomes(client, "far", lambda host: host.incarnation > far.incarnation + 1)
                await trial.goes_on(workers=2)
                await trial.keeps_its_promises(trial_sha)


def test_a_machine_that_is_not_reached_does_not_join(network: Namespaces, tmp_path: Path) -> None:
    """As one behind a tunnel, or in a container: it reaches the pool, and nobody reaches its workers."""
    folder = folder_of(tmp_path)
    inside = [*network.enter("elsewhere"), "ip", "address", "add", "172.31.255.2/32", "dev", "lo"]
    subprocess.run(inside, check=True)
    with pool_up(tmp_path / "home", "--listen", network.address, "--slots", 1) as pool:
        joiner = Joiner(network, pool)
        for address, why in (("127.0.0.1", "Connection refused"), ("172.31.255.2", "")):
            refused = joiner.refusal("--host", "far", "--address", address, *folder)
            assert f"workers on far would be at {address}, where other hosts do not reach them ({why}" in refused
            assert "pass an address of that machine that all hosts reach with --address" in refused
        refused = joiner.refusal("--host", "far", "--address", "192.0.2.1", *folder)
        assert "--address: workers cannot listen on 192.0.2.1" in refused
        assert [host["id"] for host in pool.ask("hosts")["hosts"]] == ["host-1"]

        beside = Joiner(network, pool, is_elsewhere=False)
        with (
            beside.joined("--host", "near", "--address", "127.0.0.2", "--folder", tmp_path / "near"),
            joiner.joined("--host", "far", *folder) as process,
        ):
            left = end(process, signal.SIGTERM)
        assert "this machine does not reach workers on near at 127.0.0.2 (Connection refused): it must" in left.err


@pytest.mark.nightly
def test_a_joined_host_is_kept_alive_and_waits_for_its_pool(network: Namespaces, tmp_path: Path, until: Any) -> None:
    def host(pool: UpPool, name: str) -> dict[str, Any]:
        return next((host for host in pool.ask("hosts")["hosts"] if host["id"] == name), {})

    home = tmp_path / "home"
    listen = ("--listen", network.address, "--slots", 1)
    with pool_up(home, *listen) as pool, Joiner(network, pool).joined("--host", "far", *folder_of(tmp_path)) as process:
        until(lambda: host(pool, "far").get("state") == "up")
        first = host(pool, "far")["incarnation"]
        (agent,) = psutil.Process(process.pid).children()
        agent.kill()
        until(lambda: host(pool, "far")["incarnation"] > first)
        second = host(pool, "far")["incarnation"]

        assert pool.end(signal.SIGINT).status == 0
        with pool_up(home, *listen) as again:
            assert again.ready["url"] == pool.ready["url"]
            until(lambda: {host(again, name).get("state") for name in ("far", "host-1")} == {"up"})
            assert host(again, "far")["incarnation"] == second
            assert end(process, signal.SIGTERM).status == 0
            assert host(again, "far")["state"] == "left"
