"""What shows how a promise was broken outlives the pool."""

import json
import shutil
from pathlib import Path

import pytest

from resile.chaos.members import read_commits
from resile.chaos.observation import Observations
from resile.chaos.report import document, keep_evidence
from resile.chaos.verdict import CampaignRecord
from resile_shared.http.api import JobView
from resile_shared.messages.jobs import JobEvent

from .test_members import FIRST
from .test_verdict import SHA, completed, events


def test_logs_jobs_events_and_commits_outlive_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    home, account = tmp_path / "pool" / "home", tmp_path / "pool" / "commits.jsonl"
    (home / "logs").mkdir(parents=True)
    (home / "logs" / "host-1.log").write_text("worker started")
    account.write_text("".join(f"{commit.model_dump_json()}\n" for commit in FIRST))
    job = completed()
    record = CampaignRecord(("job-1",), [job], Observations(events=events(job)), [], SHA)
    report = document(record, ["something broke"], seed=7)
    kept = keep_evidence(record, report, home=home, account=account)
    shutil.rmtree(tmp_path / "pool")
    assert (kept / "logs" / "host-1.log").read_text() == "worker started"
    assert json.loads((kept / "report.json").read_text())["faults"] == ["something broke"]
    assert read_commits((kept / "commits.jsonl").read_text()) == {"job-1": FIRST}
    assert [JobView.model_validate_json(line) for line in (kept / "jobs.jsonl").read_text().splitlines()] == [job]
    told = [JobEvent.model_validate_json(line) for line in (kept / "events.jsonl").read_text().splitlines()]
    assert told == record.seen.events


def test_a_pool_without_logs_or_an_account_leaves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    record = CampaignRecord((), [], Observations(), [], SHA)
    kept = keep_evidence(record, {}, home=tmp_path / "none", account=None)
    assert {path.name for path in kept.iterdir()} == {"report.json", "jobs.jsonl", "events.jsonl"}
