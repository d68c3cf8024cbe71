"""The real commands within the limits of a container: a quota of processors, and a small /dev/shm."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resile_testing.control_groups import limited_group

from .pools import pool_up

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="control groups and mounts need root")


def test_a_pool_and_a_run_have_as_many_workers_as_their_quota_allows(tmp_path: Path, until: Any, resile: Any) -> None:
    with limited_group("cpu", 150_000) as inside:
        with pool_up(tmp_path / "pool", prefix=inside) as pool:
            until(lambda: pool.ask("hosts")["hosts"])
            (host,) = pool.ask("hosts")["hosts"]
        assert len(host["slots"]) == 1, host
        command = [*inside, sys.executable, "-m", "resile", "run", str(resile.script()), "--home", str(resile.home)]
        done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    sizes = {item["workers"] for item in json.loads(done.stdout)["history"] if item["kind"] == "allocation"}
    assert sizes == {1}
