"""Writes the table of docs/fidelity.md: `python -m tests.learner.fidelity`."""

from .table import FILE, written

if __name__ == "__main__":
    FILE.write_text(written(FILE.read_text()))
