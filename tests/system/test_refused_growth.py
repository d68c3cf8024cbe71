"""A job whose workers cannot follow a growth trains on as it was."""

import resource
from pathlib import Path

import psutil
import pytest

from resile.pool.worker_processes import workers_below
from resile_learner.worker.peers import OTHER_DESCRIPTORS

from .conftest import TRAIN
from .pools import pool_up

pytestmark = pytest.mark.long


def test_a_job_that_may_not_open_enough_files_to_grow_goes_on_with_fewer_workers(
    tmp_path: Path, undisturbed: str
) -> None:
    script = tmp_path / "code" / "train.py"
    script.parent.mkdir()
    script.write_text(TRAIN)
    with pool_up(tmp_path / "home", "--hosts", 1, "--slots", 6) as pool:
        other = pool.submit(script, "--max-workers", 4, "--min-workers", 4, "--", "--pause", 0.5)
        pool.becomes(other, lambda view: view["workers"] == 4)
        job = pool.submit(script, "--", "--pause", 0.5)
        pool.becomes(job, lambda view: view["workers"] == 2 and view["iteration"] > 2)
        for worker in workers_below(pool.service("resile_learner").pid, "host-1"):
            if worker.job == job:
                open_files = max(OTHER_DESCRIPTORS, psutil.Process(worker.pid).num_fds())
                limit = open_files + 4 * 3  # three workers, each of which takes four
                resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (limit, limit))
        assert pool.run("stop", other).status == 0
        view = pool.completed(job)
        assert view["params_sha256"] == undisturbed
        (warning,) = [item["reason"] for item in view["history"] if item["kind"] == "warning"]
        assert "cannot train with 6 workers" in warning
        assert "raise the hard limit of open files" in warning
        sizes = [item["workers"] for item in view["history"] if item["kind"] == "allocation"]
        assert max(sizes) <= 4, sizes
