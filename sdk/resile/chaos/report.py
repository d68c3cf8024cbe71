"""The report of a campaign, as text and as JSON, and what is kept of a pool that broke a promise."""

import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from .verdict import CampaignRecord, Outcome


def recovery_times(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return recovery times for each kind of attack and each kind of part that it hit."""
    seconds: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for outcome in outcomes:
        attack = outcome.injected.attack
        for part in outcome.recovered:
            what = "job" if part.what in outcome.injected.workers else attack.target.what.value
            what = "request" if part.what in outcome.injected.effects else what
            if part.seconds is not None:
                seconds[f"{attack.kind} {attack.target.what}", what].append(part.seconds)
    return [
        {
            "attack": attack,
            "part": part,
            "count": len(found),
            "median_seconds": round(median(found), 3),
            "p99_seconds": round(percentile(found, 0.99), 3),
        }
        for (attack, part), found in sorted(seconds.items())
    ]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of ``values`` that at least ``share`` of them do not exceed."""
    return sorted(values)[ceil(share * len(values)) - 1]


def table(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, ...]]:
    """Return the same as table rows, the heading first."""
    yield "ATTACK", "RECOVERY OF", "COUNT", "MEDIAN", "P99"
    for row in recovery_times(outcomes):
        times = (f"{row[key]:.2f} s" for key in ("median_seconds", "p99_seconds"))
        yield row["attack"], row["part"], str(row["count"]), *times


def skipped(record: CampaignRecord) -> Iterator[tuple[str, ...]]:
    """Return the attacks that could not be carried out as table rows, the heading first."""
    yield "NOT CARRIED OUT", "COUNT", "REASON"
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for attack in record.skipped:
        reasons[attack.attack].append(attack.reason)
    for name, found in sorted(reasons.items()):
        yield name, str(len(found)), found[-1]


def document(record: CampaignRecord, faults: Sequence[str], *, seed: int) -> dict[str, Any]:
    """Return the report as a JSON document."""
    return {
        "seed": seed,
        "jobs": list(record.accepted),
        "attacks": [outcome_document(outcome) for outcome in record.outcomes],
        "skipped": [{"attack": attack.attack, "reason": attack.reason} for attack in record.skipped],
        "members": record.members is not None,
        "recovery": recovery_times(record.outcomes),
        "params_sha256": record.undisturbed_sha256,
        "faults": list(faults),
    }


def outcome_document(outcome: Outcome) -> dict[str, Any]:
    """Return one attack as a JSON document."""
    injected = outcome.injected
    return {
        "number": outcome.number,
        "attack": injected.attack.kind.value,
        "target": str(injected.attack.target),
        "seconds": injected.attack.seconds,
        "time": injected.since,
        "processes": list(injected.processes),
        "detail": injected.detail,
        "recovered": {part.what: part.seconds for part in outcome.recovered},
        "traces": dict(outcome.traces),
    }


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
