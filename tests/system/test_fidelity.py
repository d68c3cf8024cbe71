"""Situations of docs/fidelity.md, by the real command: the bits of `python`, whatever the number of workers."""

import re
from pathlib import Path

import pytest

from ..learner.fidelity import table
from ..learner.fidelity.outcome import NAMED, NAMED_LATE
from ..learner.fidelity.situation import SITUATIONS
from .running import plain_output, run, sha_in

pytestmark = [pytest.mark.long, pytest.mark.nightly]

TABLE = table.FILE.read_text()


def outcome(name: str) -> str:
    """What the table says of the body that runs once for each batch."""
    return table.row_in(TABLE, name).split(" | ")[1]


TRAINING = [name for name in SITUATIONS if not outcome(name).startswith((NAMED, NAMED_LATE))]


def digest_in(output: str) -> str:
    found = re.search(r"digest ([0-9a-f]{64})", output)
    assert found, output
    return found.group(1)


@pytest.mark.parametrize("name", TRAINING)
def test_a_situation_has_the_bits_of_the_plain_command_while_workers_join(name: str, tmp_path: Path) -> None:
    alone = plain_output("situation.py", name)
    outcome = run("situation.py", "--plan", "0:1,2:3", home=tmp_path, args=(name,))
    assert outcome.sha == sha_in(alone)
    assert digest_in(outcome.errors) == digest_in(alone)
