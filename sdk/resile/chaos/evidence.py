"""Keeps what shows how a promise was broken: the pool of a campaign is removed at its end."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .verdict import CampaignRecord


def keep_evidence(record: CampaignRecord, report: Mapping[str, Any], *, home: Path, account: Path | None) -> Path:
    """Store the logs of the pool at ``home``, the jobs, the events and the members' ``account`` beside the report.

    Returns the folder, which is new and below that for temporary files.
    """
    folder = Path(tempfile.mkdtemp(prefix="resile-chaos-broken-"))
    (folder / "report.json").write_text(json.dumps(report, indent=1))
    for name, models in (("jobs", record.jobs), ("events", record.seen.events)):
        (folder / f"{name}.jsonl").write_text("".join(f"{model.model_dump_json()}\n" for model in models))
    if account is not None and account.exists():
        shutil.copy(account, folder / "commits.jsonl")
    logs = home / "logs"
    if logs.exists():
        shutil.copytree(logs, folder / "logs")
    return folder
