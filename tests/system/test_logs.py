"""The logs of a pool stay small, however much is printed."""

import os
from collections.abc import Callable
from pathlib import Path

from resile_shared.log_files import MAX_LOG_BYTES

from .pools import pool_up


def test_the_logs_of_agents_are_limited(tmp_path: Path, until: Callable[..., None]) -> None:
    with pool_up(tmp_path / "home", "--hosts", 1, "--slots", 1) as pool:
        log = pool.home / "hosts/host-1/fork-server.log"
        until(log.exists)
        os.truncate(log, MAX_LOG_BYTES + 1)
        until(lambda: log.stat().st_size == 0)
