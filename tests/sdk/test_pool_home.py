"""The home of a pool: who may use it, and what it tells."""

import os
import resource
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from resile.pool.home import PoolHome, read_pool
from resile_shared.errors import ResileError, UsageError


def test_a_home_is_for_its_owner_alone(tmp_path: Path) -> None:
    home = PoolHome(tmp_path / "home")
    home.announce("http://127.0.0.1:1234", storage="file:///s")
    for name in ("pool.json", "token"):
        assert stat.S_IMODE((home.path / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o700


def test_a_pool_is_announced_while_it_is_there(tmp_path: Path) -> None:
    assert read_pool(tmp_path) is None
    home = PoolHome(tmp_path)
    home.announce("http://127.0.0.1:1234", storage="file:///s")
    pool = read_pool(tmp_path)
    assert pool is not None
    assert (pool.url, pool.token, pool.pid) == ("http://127.0.0.1:1234", home.token, os.getpid())
    home.close()
    assert read_pool(tmp_path) is None


def test_only_a_pool_that_was_asked_to_be_is_open_to_chaos(tmp_path: Path) -> None:
    home = PoolHome(tmp_path)
    for chaos in (False, True):
        home.announce("http://127.0.0.1:1234", storage="file:///s", chaos=chaos)
        pool = read_pool(tmp_path)
        assert pool is not None
        assert pool.chaos is chaos
    home.close()


def test_a_second_pool_in_a_home_is_refused_and_the_first_one_named(tmp_path: Path) -> None:
    first = PoolHome(tmp_path)
    first.announce("http://127.0.0.1:1234", storage="file:///s")
    with pytest.raises(UsageError, match=rf"at http://127.0.0.1:1234 \(process {os.getpid()}\)"):
        PoolHome(tmp_path)
    first.close()
    PoolHome(tmp_path).close()


def test_a_killed_pool_leaves_no_lock_and_the_token_stays(tmp_path: Path) -> None:
    code = "import os, sys; from pathlib import Path; from resile.pool.home import PoolHome"
    code += "; print(PoolHome(Path(sys.argv[1])).token, flush=True); os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    home = PoolHome(tmp_path)
    assert done.stdout.strip() == home.token
    home.close()


def test_a_pool_keeps_to_its_storage(tmp_path: Path) -> None:
    home = PoolHome(tmp_path)
    assert home.storage(None) == (tmp_path / "storage").as_uri()
    assert home.storage("s3://bucket/pool") == "s3://bucket/pool"
    home.announce("http://127.0.0.1:1234", storage="s3://bucket/pool")
    assert home.storage(None) == "s3://bucket/pool"
    with pytest.raises(UsageError, match="stores its packages and checkpoints in s3://bucket/pool: omit --storage"):
        home.storage("s3://bucket/other")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_port_of_last_time_is_taken_again_if_it_is_free(host: str, tmp_path: Path) -> None:
    home = PoolHome(tmp_path)
    assert home.last_free_port(host) == 0
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        home.api_file.write_text(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        assert home.last_free_port(host) == 0
    assert home.last_free_port(host) == port


def test_a_home_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "format").write_text("99\n")
    with pytest.raises(UsageError, match=r"has format '99'.*update Resile"):
        PoolHome(tmp_path)


@pytest.mark.parametrize("place", ["file/home", "/proc/home"])
def test_a_home_that_cannot_be_written_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot be used: .*name another with --home"):
        PoolHome(tmp_path / place)


def test_a_pool_file_that_makes_no_sense_is_said_to(tmp_path: Path) -> None:
    (tmp_path / "pool.json").write_text("{}")
    with pytest.raises(ResileError, match="is invalid: restart the pool with `resile up`"):
        read_pool(tmp_path)


@pytest.mark.parametrize("command", [["up"], ["run", "{script}"]])
def test_a_home_that_cannot_be_written_is_named_and_usable_later(tmp_path: Path, command: list[str]) -> None:
    """As on a full disk: files can be made, and nothing can be written to them."""
    script = tmp_path / "train.py"
    script.write_text("print()")
    home = tmp_path / "home"
    for _ in range(2):
        ended = subprocess.run(
            [sys.executable, "-m", "resile", *(word.format(script=script) for word in command), "--home", str(home)],
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode in (1, 2)
        assert ended.stderr.count("\n") == 1
        assert str(home) in ended.stderr
        assert "File too large" in ended.stderr
    PoolHome(home).close()
