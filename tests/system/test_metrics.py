"""What a real pool serves to Prometheus: found as deploy/prometheus finds it, complete, and true."""

import json
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from resile_testing.samples import samples
from resile_testing.waiting import PATIENCE_SECONDS

from ..test_deploy import DEPLOY, used_metrics
from .conftest import TRAIN
from .pools import UpPool, pool_up

SLOWLY = ("--pause", 0.05, "--epochs", 10_000, "--shards", 12)
FROM_PROMETHEUS = {"up"}


def scraped(pool: UpPool) -> dict[str, dict[str, float]]:
    """What each part of a pool serves, by the files that Prometheus watches."""
    configuration = yaml.safe_load((DEPLOY / "prometheus/prometheus.yaml").read_text())
    (pattern,) = configuration["scrape_configs"][0]["file_sd_configs"][0]["files"]
    found = {}
    for file in pool.home.glob(pattern.removeprefix("/pool/")):
        with suppress(OSError):  # it is being restarted
            (entry,) = json.loads(file.read_bytes())
            (target,) = entry["targets"]
            with urllib.request.urlopen(f"http://{target}/metrics", timeout=30) as answer:
                found[entry["labels"]["part"]] = samples(answer.read())
    return found


def becomes(pool: UpPool, fits: Callable[[dict[str, dict[str, float]]], bool]) -> dict[str, dict[str, float]]:
    """Scrape until what is served is as ``fits`` wants it."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not fits(found := scraped(pool)):
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    return found


def pool_of_compose() -> list[str]:
    """The command that the pool's container runs, without its home."""
    command = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["pool"]["command"]
    assert command[:4] == ["resile", "up", "--home", "/pool"]
    return [{"8080": "0", "0.0.0.0": "127.0.0.1"}.get(word, word) for word in command[4:]]


@pytest.mark.long
def test_a_pool_serves_every_metric_that_rules_and_dashboards_read(tmp_path: Path) -> None:
    """The pool of deploy/compose.yaml, in which a job starts, is rescaled, loses a worker, and ends."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with pool_up(tmp_path / "home", *pool_of_compose()) as pool:
        assert scraped(pool).keys() == {"registry", "scheduler", "monitor", "host-1", "host-2"}
        one = pool.submit(script, "--name", "one", "--", *SLOWLY)
        pool.becomes(one, lambda job: job["workers"] == 4)
        two = pool.submit(script, "--name", "two", "--", *SLOWLY)
        for job in (one, two):
            pool.becomes(job, lambda job: job["workers"] == 2)
        found = becomes(pool, lambda found: found["scheduler"].get("resile_job_change_seconds_count", 0) >= 1)
        assert found["scheduler"]['resile_jobs{state="running"}'] <= 2
        assert found["registry"]['resile_hosts{state="up"}'] == 2
        assert pool.run("stop", two).status == 0
        pool.becomes(one, lambda job: job["workers"] == 4)
        pool.service("host-2").kill()
        found = becomes(pool, lambda found: found["scheduler"].get("resile_job_recovery_seconds_count", 0) >= 1)
        assert found["scheduler"]['resile_jobs_ended_total{state="stopped"}'] == 1
        found = becomes(pool, lambda found: "resile_iterations_total" in found.get("host-1", {}))
        served = {name.partition("{")[0] for part in found.values() for name in part}
        assert used_metrics() - served <= FROM_PROMETHEUS | {"resile_worker_exits_total"}, (
            "no worker need be seen to end"
        )
        assert pool.run("stop", one).status == 0
