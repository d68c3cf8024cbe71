"""Runs a short campaign against each wrong pool: ``python tests/chaos/wrong/campaigns.py [NAME ...]``.

Each must be condemned, for its own reason.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from wrong_pools import WRONG, Wrong

HERE = Path(__file__).parent
SCRIPT = HERE.with_name("scripts") / "attacked.py"
MINUTES = 0.5


def faults_of(name: str) -> list[str]:
    """Run a campaign against the wrong pool ``name``; return the broken promises."""
    attacks = [word for attack in WRONG[name].attacks for word in ("--only", attack)]
    command = ["chaos", "campaign", "--own-pool", SCRIPT, "--minutes", MINUTES, *attacks, "--json"]
    with tempfile.TemporaryDirectory(prefix="w-") as folder:  # with it goes what the campaign keeps
        ended = subprocess.run(
            [sys.executable, "-m", "resile", *map(str, command)],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(HERE), "WRONG_POOL": name, "TMPDIR": folder},
        )
    found: list[str] = json.loads(ended.stdout).get("faults", []) if ended.stdout else []
    return found


def is_condemned(wrong: Wrong, faults: list[str]) -> bool:
    """Whether one of ``faults`` is the one that the wrong pool must have."""
    return any(re.search(wrong.fault, fault) for fault in faults)


def main(names: list[str]) -> int:
    """Run the campaigns; print a line for each."""
    status = 0
    for name in names or WRONG:
        faults = faults_of(name)
        verdict = "condemned" if is_condemned(WRONG[name], faults) else "NOT CONDEMNED"
        print(f"{name}: {verdict}: {'; '.join(faults)[:400] or 'no fault'}", flush=True)
        status |= verdict != "condemned"
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
