"""What a supervisor says beside its work never ends that."""

import os
import subprocess
import sys

import pytest

LOGGING = """
import os, sys
from resile.cli.options import logger_beside

log = logger_beside(as_json=False)
log("one")
os.dup2(os.open(sys.argv[1], os.O_WRONLY), 1)
log("two")
log("three")
print("goes on", file=sys.stderr)
"""


def logged(stdout: int, *, then: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", LOGGING, then]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=True)


def test_a_full_disk_costs_lines_alone() -> None:
    assert logged(subprocess.PIPE, then="/dev/full").stderr == "goes on\n"


def test_a_reader_that_is_gone_costs_lines_alone() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert logged(writer, then="/dev/null").stderr == "goes on\n"
    finally:
        os.close(writer)


LOGGING_ONE = """
import sys
from resile.cli.options import logger_beside

if sys.argv[1] == "closed":
    sys.stdout = None
logger_beside(as_json=False)("caf\\u00e9 \\udcff")
"""


@pytest.mark.parametrize(("stdout", "logged"), [("open", b"caf\\xe9 \\udcff\n"), ("closed", b"")])
def test_a_character_that_the_output_cannot_encode_is_escaped(stdout: str, logged: bytes) -> None:
    command = [sys.executable, "-c", LOGGING_ONE, stdout]
    assert subprocess.check_output(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}) == logged
