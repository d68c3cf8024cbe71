"""`resile up`: what it refuses, and what it tells people."""

import os
import re
import shlex
from pathlib import Path

import pytest

from resile.cli.up import ready_lines
from resile.client import find_server
from resile.pool.home import PoolHome
from resile.pool.services import ADDRESS, PoolOptions, outward_address
from resile_shared.errors import ResileError

from .test_pool_commands import failure


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--listen", "here"], "--listen 'here' is not an IP address"),
        (["--listen", "192.0.2.1"], "cannot listen on --listen 192.0.2.1 --port 0"),
        (["--listen", "0.0.0.0", "--namespaces"], "omit one of them"),
    ],
)
def test_what_cannot_be_is_refused(
    options: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason in failure(["up", "--home", str(tmp_path), *options], capsys, status=2)


@pytest.mark.parametrize(
    ("file", "status", "reason"),
    [
        ("format", 2, "and this version of Resile knows 1: update Resile, or choose another"),
        ("storage-url", 2, "is not a URL of storage"),
        ("token", 1, "monitor: --token-file: "),
    ],
)
def test_a_damaged_home_is_refused_in_one_line(
    file: str, status: int, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    PoolHome(tmp_path).close()
    (tmp_path / file).write_bytes(b"\xff\xfe")
    assert reason in failure(["up", "--home", str(tmp_path), "--slots", "1"], capsys, status=status)


def test_namespaces_need_root(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "requires root" in failure(["up", "--home", str(tmp_path), "--namespaces"], capsys, status=2)


def test_a_pool_that_listens_to_other_machines_tells_how_they_join(tmp_path: Path) -> None:
    home = PoolHome(tmp_path)
    try:
        shut = ready_lines(home, PoolOptions(), "http://127.0.0.1:8080")
        assert not any("--join" in line for line in shut)
        text = "\n".join(ready_lines(home, PoolOptions(listen="0.0.0.0"), "http://0.0.0.0:8080"))
        assert f"resile host --join http://{outward_address()}:8080 --token-file token" in text
        assert f"a copy of {home.token_file}" in text
        assert f"only from machines that share {(tmp_path / 'storage').as_uri()}" in text
        assert home.token not in text
        text = "\n".join(ready_lines(home, PoolOptions(listen="fd00::1", storage="s3://b/p"), "http://[fd00::1]:8080"))
        assert "--join http://[fd00::1]:8080" in text
        assert "share" not in text
    finally:
        home.close()


def test_a_home_with_a_space_is_quoted_in_the_commands_that_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RESILE_SERVER", raising=False)
    path = tmp_path / "my pool"
    with pytest.raises(ResileError, match="no pool is running") as raised:
        find_server(home=path)
    home = PoolHome(path)
    try:
        lines = ready_lines(home, PoolOptions(), "http://127.0.0.1:8080")
    finally:
        home.close()
    commands = re.findall(r"resile (?:up|submit|top|page)[^`,\n]*", f"{raised.value}\n" + "\n".join(lines))
    homes = [shlex.split(command)[-1] for command in commands if "--home" in command]
    assert homes == [str(path)] * 4


def test_workers_are_reached_where_the_pool_listens() -> None:
    assert PoolOptions().workers_at == ADDRESS
    assert PoolOptions(listen="::1").workers_at == ADDRESS
    assert PoolOptions(listen="10.0.0.1").workers_at == "10.0.0.1"
    assert PoolOptions(listen="0.0.0.0").workers_at == outward_address()
    assert PoolOptions(listen="fd00::1").workers_at == outward_address()
