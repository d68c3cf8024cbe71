"""How benches print: tables, and targets with their verdicts."""

import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Target(NamedTuple):
    """A number that should be at most ``limit``."""

    what: str
    measured: float
    limit: float
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether it is, to the digits that are printed."""
        return round(self.measured, 2) <= self.limit


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    print(f"\n{title}")
    for row in (header, *rows):
        first, *others = (
            cell.ljust(w) if not i else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        print("  " + "   ".join([first, *others]), flush=True)


def conclude(targets: Iterable[Target]) -> None:
    """Print each target, what was measured, and ok or MISSED; end with status 1 if one is missed."""
    print("\nTargets")
    targets = list(targets)
    for target in targets:
        verdict = "ok" if target.met else "MISSED"
        unit = f" {target.unit}" if target.unit else ""
        print(
            f"  {verdict:6}  {target.what}: {target.measured:.2f}{unit}, at most {target.limit:.2f}{unit}", flush=True
        )
    if not all(target.met for target in targets):
        sys.exit(1)
