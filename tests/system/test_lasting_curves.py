"""The curves of a job that has completed are there after the pool was stopped and started again."""

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from resile_testing.waiting import PATIENCE_SECONDS

from .conftest import ITERATIONS_PER_EPOCH, TRAIN
from .pools import UpPool, pool_up

EPOCHS = 3


def curves(pool: UpPool, job: str) -> dict[str, Any]:
    """What the API says, once the newest report is in."""
    client = json.loads((pool.home / "pool.json").read_bytes())
    request = urllib.request.Request(
        f"{client['url']}/v1/jobs/{job}/curves", headers={"Authorization": f"Bearer {client['token']}"}
    )
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
        if found["training"]["iterations"][-1:] == [EPOCHS * ITERATIONS_PER_EPOCH]:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


@pytest.mark.nightly
@pytest.mark.long
def test_a_job_that_has_completed_has_its_curves_when_the_pool_is_started_again(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with pool_up(tmp_path / "home", "--hosts", 1, "--slots", 1) as pool:
        job = pool.submit(script, "--", "--epochs", EPOCHS)
        done = pool.completed(job)
        before = curves(pool, job)
        assert before["training"]["values"]["loss"][-1] == pytest.approx(done["loss"], rel=1e-6)
    with pool_up(tmp_path / "home", "--hosts", 1, "--slots", 1) as pool:
        after = curves(pool, job)
    for table in ("training", "validation"):
        for column in ("iterations", "times", "values"):
            assert after[table][column] == before[table][column]
