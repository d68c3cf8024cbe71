"""Reads CSV files of numbers and names; what is wrong in one is reported by file, line and column."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from resile_shared.errors import UsageError

T = TypeVar("T")
Row = tuple[int, Mapping[str, str]]
"""The number of the line, from 1, and its cells by column."""


MOST = 10**12
"""The largest count of iterations, samples, or anything else."""
MOST_SECONDS = 10 * 365 * 86400.0
SIMILAR = 0.8
"""The similarity (`difflib`) from which the name of a column is taken for a misspelling of another."""
MOMENT = "a number of seconds, of ten years at most"
"""What `moment` expects, in words."""


class MalformedFile(UsageError):
    """A file cannot be read: ``path``, ``line`` (from 1) and ``column`` say where."""

    def __init__(self, path: Path, problem: str, *, line: int = 1, column: str = "") -> None:
        where = f"{path}, line {line}" + (f", column {column}" if column else "")
        super().__init__(f"{where}: {problem}")
        self.path, self.line, self.column = path, line, column


def read_header(path: Path) -> list[str]:
    """Return the names of the columns of a CSV file.

    Raises:
        MalformedFile: it cannot be read.

    """
    return _read(path)[0]


def read_rows(path: Path, columns: Sequence[str]) -> list[Row]:
    """Return the rows of a CSV file with a header that has ``columns``; others are ignored.

    Raises:
        MalformedFile: it cannot be read, a column is missing, a row has too few or too many cells, or there is none.

    """
    header, rows = _read(path)
    for column in columns:
        if header.count(column) != 1:
            raise MalformedFile(path, f"the header needs the column once; it has {', '.join(header)}", column=column)
    for line, row in rows:
        if len(row) != len(header):
            raise MalformedFile(path, f"{len(row)} cells, and the header has {len(header)}", line=line)
    if not rows:
        raise MalformedFile(path, "no rows below the header", line=2)
    return [(line, dict(zip(header, row, strict=True))) for line, row in rows]


def check_optional(path: Path, columns: Iterable[str]) -> None:
    """Check that the header has none of the optional ``columns`` twice, and none that is nearly one of them.

    Raises:
        MalformedFile: it has one of these, or it cannot be read.

    """
    known = set(columns)
    header = read_header(path)
    for column in header:
        if column in known and header.count(column) > 1:
            raise MalformedFile(path, "the header has this column more than once", column=column)
        near = [] if column in known else get_close_matches(column.strip().lower(), known, n=1, cutoff=SIMILAR)
        if near:
            raise MalformedFile(path, f"this column is unknown: is it {near[0]}?", column=column)


def _read(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file)
            header = next(lines, [])
            return header, [(lines.line_num, row) for row in lines if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise MalformedFile(path, f"cannot be read: {error}") from error


def cell(path: Path, row: Row, column: str, parse: Callable[[str], T], *, expected: str) -> T:
    """Return one cell as ``parse`` reads it; ``expected`` says in words what it must be.

    Raises:
        MalformedFile: ``parse`` raised ValueError.

    """
    line, cells = row
    try:
        return parse(cells[column])
    except ValueError as error:
        raise MalformedFile(path, f"{cells[column]!r} is not {expected}", line=line, column=column) from error


def positive_int(text: str) -> int:
    """Return a whole number from 1 to `MOST`."""
    number = int(text)
    if not 1 <= number <= MOST:
        raise ValueError
    return number


def non_negative(text: str) -> float:
    """Return a finite number of at least 0."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError
    return number


def positive(text: str) -> float:
    """Return a finite number above 0."""
    number = non_negative(text)
    if not number:
        raise ValueError
    return number


def moment(text: str, *, start: float = 0.0) -> float:
    """Return seconds after ``start``: at most `MOST_SECONDS`. Raises ValueError otherwise."""
    number = non_negative(text) - start
    if number > MOST_SECONDS:
        raise ValueError
    return number


def duration(text: str | float) -> float:
    """Return the seconds that something takes: from a microsecond to a day."""
    number = float(text)
    if not 1e-6 <= number <= 86400:
        raise ValueError
    return number
