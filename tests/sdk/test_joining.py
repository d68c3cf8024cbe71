"""`resile host`: what keeps a machine from joining is said before anything is started."""

import io
import os
from pathlib import Path

import pytest

from resile.cli import main
from resile.http_requests import Server
from resile.pool.joined import JoinOptions, bus_url, check_peers, check_storage, lock_folder
from resile.pool.services import outward_address
from resile_shared.errors import ResileError, UsageError
from resile_shared.http.api import Peer
from resile_shared.reachability import listening
from resile_shared.storage.objects import PROBE
from resile_shared.version import VERSION

from .api_server import TOKEN as API_TOKEN
from .api_server import ApiServer
from .test_pool_commands import failure

TOKEN = ["--token", "a-token-of-some-pool"]


def test_a_token_is_read_from_a_file_or_from_stdin(
    api_server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(f"{API_TOKEN}\n")
    (tmp_path / "wrong").write_text("wrong")
    join = ["host", "--join", api_server.url, "--token-file"]
    assert "rejects this token" in failure([*join, str(tmp_path / "wrong")], capsys, status=2)
    assert "--token-file" in failure([*join, str(tmp_path / "none")], capsys, status=2)
    assert "rejects" not in failure([*join, str(tmp_path / "token")], capsys)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{API_TOKEN}\n"))
    assert "rejects" not in failure([*join, "-"], capsys)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--join", "pool:8080", *TOKEN], "--join 'pool:8080' is not a URL"),
        (["--join", "http://pool:8080"], "requires a token: pass it with --token-file"),
        (["--join", "http://pool:8080", *TOKEN, "--label", "gpu"], "--label 'gpu': must have the form NAME=VALUE"),
        (["--join", "http://pool:8080", *TOKEN, "--label", "a=b,c=d"], "without commas"),
        (["--join", "http://pool:8080", *TOKEN, "--address", "here"], "--address 'here' is not an IP address"),
        (["--join", "http://pool:8080", *TOKEN, "--address", "fd00::1"], "--address fd00::1: workers listen on IPv4"),
    ],
)
def test_what_makes_no_sense_is_refused(options: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert reason in failure(["host", *options], capsys, status=2)


def test_a_wrong_token_and_a_pool_that_is_not_there_are_told_apart(
    api_server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = failure(["host", "--join", api_server.url, *TOKEN], capsys, status=2)
    assert f"the pool at {api_server.url} rejects this token" in refused
    gone = failure(["host", "--join", "http://127.0.0.1:1", *TOKEN], capsys)
    assert "the pool at http://127.0.0.1:1 does not answer (Connection refused)" in gone
    assert not list((tmp_path / "home").glob("joined/*"))


def test_a_machine_of_another_version_than_the_pool_does_not_join(
    api_server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = failure(["host", "--join", api_server.url, "--token", API_TOKEN], capsys)
    assert refused == (
        f"resile: this machine runs Resile {VERSION}, but its pool runs Resile 9.9.9: install the pool's version and "
        "start again\n"
    )
    assert not list((tmp_path / "home").glob("joined/*"))


def test_a_folder_is_for_one_host_at_a_time(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path / "far")
    with pytest.raises(UsageError, match=rf"--folder: another `resile host` uses {tmp_path}/far: stop it, or choose"):
        lock_folder(tmp_path / "far")
    os.close(lock)
    os.close(lock_folder(tmp_path / "far"))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--folder: .*/file cannot be created: File exists: choose another folder"):
        lock_folder(tmp_path / "file")


def test_only_the_storage_of_the_pool_will_do(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    with pytest.raises(
        UsageError, match=r"--storage: file://.* is not the pool's storage on this machine: mount the shared folder"
    ):
        check_storage(url, probe=b"this pool")
    (tmp_path / PROBE).write_bytes(b"that pool")
    with pytest.raises(UsageError, match="it belongs to another pool"):
        check_storage(url, probe=b"this pool")
    with pytest.raises(UsageError, match=r"--storage: .*is not a URL of storage"):
        check_storage("nonsense", probe=b"this pool")
    check_storage(url, probe=b"that pool")


async def test_a_host_that_reaches_no_other_one_does_not_join_and_one_that_misses_some_says_so() -> None:
    said: list[str] = []
    async with listening("127.0.0.1", "near") as port:
        near, far = Peer(host="near", address="127.0.0.1", port=port), Peer(host="far", address="127.0.0.2", port=port)
        other = Peer(host="other", address="127.0.0.1", port=port)
        await check_peers([], log=said.append)
        await check_peers([near], log=said.append)
        assert not said
        await check_peers([near, far], log=said.append)
        assert said[0].startswith(
            "this machine does not reach workers on far at 127.0.0.2 (Connection refused): it must"
        )
        both = r"far at 127.0.0.2 \(Connection refused\), other at 127.0.0.1 \(another machine answers\): it must"
        with pytest.raises(ResileError, match=both):
            await check_peers([far, other], log=said.append)


def test_a_bus_on_the_loopback_of_its_machine_is_looked_for_on_that_machine() -> None:
    assert bus_url("nats://127.0.0.1:4222", pool_host="10.0.0.1") == "nats://10.0.0.1:4222"
    assert bus_url("nats://[::1]:4222", pool_host="fd00::1") == "nats://[fd00::1]:4222"
    assert bus_url("nats://10.0.0.2:4222", pool_host="10.0.0.1") == "nats://10.0.0.2:4222"


def test_workers_of_a_host_that_reaches_its_pool_by_ipv6_are_reached_by_ipv4() -> None:
    assert JoinOptions(Server("http://[fd00::1]:8080", "token"), "far").workers_at == outward_address()
    assert JoinOptions(Server("http://127.0.0.1:8080", "token"), "far").workers_at == "127.0.0.1"
    assert JoinOptions(Server("http://[fd00::1]:8080", "token"), "far", address="10.0.0.2").workers_at == "10.0.0.2"


def test_the_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["host", "--help"]) == 0
    assert "Join this machine to a pool elsewhere" in capsys.readouterr().out
