"""What a campaign has found, as text and as JSON. Pure."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import ceil
from statistics import median
from typing import Any

from .verdict import Evidence, Outcome


def recovery_times(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return, for each kind of attack and each kind of part that it hit, how long recovery took."""
    seconds: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for outcome in outcomes:
        attack = outcome.struck.attack
        for part in outcome.recovered:
            what = "job" if part.what in outcome.struck.workers else attack.target.what.value
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
    """Return the rows of the same, below a heading."""
    yield "ATTACK", "RECOVERY OF", "COUNT", "MEDIAN", "P99"
    for row in recovery_times(outcomes):
        times = (f"{row[key]:.2f} s" for key in ("median_seconds", "p99_seconds"))
        yield row["attack"], row["part"], str(row["count"]), *times


def document(evidence: Evidence, faults: Sequence[str], *, seed: int) -> dict[str, Any]:
    """Return everything for programs."""
    return {
        "seed": seed,
        "jobs": list(evidence.accepted),
        "attacks": [outcome_document(outcome) for outcome in evidence.outcomes],
        "recovery": recovery_times(evidence.outcomes),
        "params_sha256": evidence.alone_sha256,
        "faults": list(faults),
    }


def outcome_document(outcome: Outcome) -> dict[str, Any]:
    """Return one attack for programs."""
    struck = outcome.struck
    return {
        "number": outcome.number,
        "attack": struck.attack.kind.value,
        "target": str(struck.attack.target),
        "seconds": struck.attack.seconds,
        "time": struck.since,
        "processes": list(struck.processes),
        "detail": struck.detail,
        "recovered": {part.what: part.seconds for part in outcome.recovered},
    }
