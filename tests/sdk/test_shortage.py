"""What a user is told when this machine gives no more processes, or has no address for them."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from resile.cli import _explain_shortage


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (OSError(errno.EAGAIN, "Resource temporarily unavailable"), "ulimit -u"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
    ],
)
def test_a_limit_that_is_used_up_is_named(error: OSError | RuntimeError, advice: str) -> None:
    assert advice in _explain_shortage(error)


@pytest.mark.skipif(os.geteuid() != 0, reason="a machine without an address needs root")
@pytest.mark.parametrize("command", ["up", "run"])
def test_a_machine_without_ipv4_is_refused(command: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    words = {"up": ["up", "--listen", "::1", "--home", str(tmp_path / "home")], "run": ["run", str(script)]}[command]
    without = 'ip link set lo up && ip addr del 127.0.0.1/8 dev lo && exec "$@"'
    ended = subprocess.run(
        ["unshare", "--net", "sh", "-c", without, "sh", sys.executable, "-m", "resile", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "RESILE_HOME": str(tmp_path / "home")},
    )
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2
    assert "listen on 127.0.0.1, which this machine does not have" in line
    assert "ip addr add" in line
