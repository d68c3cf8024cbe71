"""The state diagrams of the documentation are those of the code."""

from tests.state_diagrams import FILE, written


def test_the_diagrams_are_those_of_the_tables() -> None:
    assert written(FILE.read_text()) == FILE.read_text(), "run `python -m tests.state_diagrams`"
