"""The command line of the benches, and how they print: tables, and targets with their verdicts."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Length(StrEnum):
    """How long a bench runs."""

    FULL = "full"
    QUICK = "quick"
    TINY = "tiny"
    """Executes every part once. The numbers mean nothing, and no target is checked."""

    def pick(self, *, full: T, quick: T, tiny: T) -> T:
        """Return the value for this length."""
        return {Length.FULL: full, Length.QUICK: quick, Length.TINY: tiny}[self]


def argument_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options ``--quick`` and ``--tiny``, which set ``length``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    length = parser.add_mutually_exclusive_group()
    quick, tiny = "a shorter run", "try every part once; the numbers mean nothing"
    length.add_argument("--quick", dest="length", action="store_const", const=Length.QUICK, help=quick)
    length.add_argument("--tiny", dest="length", action="store_const", const=Length.TINY, help=tiny)
    parser.set_defaults(length=Length.FULL)
    return parser


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


def conclude(targets: Iterable[Target], length: Length = Length.FULL) -> None:
    """Print each target, what was measured, and ok or MISSED; exit with status 1 if one is missed, unless tiny."""
    print("\nTargets" + (" (not checked in a tiny run)" if length is Length.TINY else ""))
    targets = list(targets)
    for target in targets:
        verdict = "-" if length is Length.TINY else "ok" if target.met else "MISSED"
        unit = f" {target.unit}" if target.unit else ""
        print(
            f"  {verdict:6}  {target.what}: {target.measured:.2f}{unit}, at most {target.limit:.2f}{unit}", flush=True
        )
    if length is not Length.TINY and not all(target.met for target in targets):
        sys.exit(1)
