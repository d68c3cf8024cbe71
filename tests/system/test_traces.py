"""What a request leads to is one trace, through all services of a real pool."""

from pathlib import Path

import pytest

from resile_shared.testing.collector import collecting

from .conftest import TRAIN
from .pools import pool_up

SLOWLY = ("--pause", 0.05, "--epochs", 10_000, "--shards", 12)


def test_a_change_of_priority_is_one_trace_from_the_request_to_the_last_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with collecting() as collector:
        for name, value in collector.environment.items():
            monkeypatch.setenv(name, value)
        with pool_up(tmp_path / "home", "--hosts", 1, "--slots", 4) as pool:
            one, two = [pool.submit(script, "--name", name, "--max-workers", 3, "--", *SLOWLY) for name in "ab"]
            for job in (one, two):
                pool.becomes(job, lambda job: job["workers"] == 2)
            assert pool.run("priority", one, 20_000).status == 0
            pool.becomes(one, lambda job: job["workers"] == 3)
            for job in (one, two):
                assert pool.run("stop", job).status == 0
    (trace,) = collector.started_by("POST /v1/jobs/{job}/priority")
    spans = {(span.name, span.attributes.get("job")) for span in trace}
    assert {
        ("decide upon JobPriority", None),
        ("carry out allocation", two),
        ("form generation", two),
        ("worker is gone", two),
        ("carry out allocation", one),
        ("start worker", one),
        ("prepare worker", one),
        ("run script to training call", one),
        ("form generation", one),
        (f"publish resile.report.{one}.switched", None),
    } <= spans
