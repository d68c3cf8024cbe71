"""The table of docs/fidelity.md, from what each situation comes to."""

import re
from collections.abc import Mapping
from pathlib import Path

from . import batches, besides, loops, losses, models, passes
from .outcome import outcomes
from .situation import SITUATIONS

FILE = Path(__file__).resolve().parents[3] / "docs" / "fidelity.md"
DECLARE = (loops, passes, batches, besides, losses, models)
"""The modules that declare situations as they are imported."""
WAYS = ("batch", "shard", "ElasticLoop", "ElasticModel")
_TABLE = re.compile(r"(<!-- table -->\n).*?(<!-- end -->)", re.DOTALL)


def row(name: str, found: Mapping[str, str]) -> str:
    """One line of the table."""
    cells = [f"`{name}`: {SITUATIONS[name].text}", *(found.get(way, "") for way in WAYS)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def written(text: str) -> str:
    """Return the text of docs/fidelity.md with the table as the situations come out."""
    head = ["| situation | " + " | ".join(WAYS) + " |", "|---" * (len(WAYS) + 1) + "|"]
    rows = [row(name, outcomes(situation)) for name, situation in SITUATIONS.items()]
    return _TABLE.sub(lambda found: found[1] + "\n".join([*head, *rows, ""]) + found[2], text)


def row_in(text: str, name: str) -> str:
    """The line that the table has for a situation; empty if it has none."""
    return next((line for line in text.splitlines() if line.startswith(f"| `{name}`:")), "")
