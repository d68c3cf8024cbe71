"""What a supervisor says beside its work never ends that."""

import os
import subprocess
import sys

import pytest

BUFFERED = {**os.environ, "PYTHONUNBUFFERED": ""}

LOGGING = """
import os, sys
from resile.cli.options import logger_beside

log = logger_beside(as_json=False)
log("one")
log("two")
%s
print("goes on", file=sys.stderr)
"""
"""What is done with a stdout that cannot be written."""


def logged(stdout: int, *, then: str) -> str:
    """Return what the process says on stderr."""
    command = [sys.executable, "-c", LOGGING % then]
    done = subprocess.run(command, env=BUFFERED, stdout=stdout, stderr=subprocess.PIPE, check=True)
    return done.stderr.decode()


def test_a_full_disk_ends_nothing() -> None:
    with open("/dev/full", "w") as full:
        assert logged(full.fileno(), then="") == "goes on\n"


FULL = """
import os, sys
from resile.cli.options import logger_beside

reader, writer = os.pipe()
os.set_blocking(reader, False)
os.set_blocking(writer, False)
size = os.write(writer, bytes(2**20))
os.dup2(writer, 1)
log = logger_beside(as_json=False)
log("one")
os.read(reader, size)
log("two")
sys.stderr.buffer.write(os.read(reader, size))
"""


def test_lines_are_shown_again_when_there_is_space() -> None:
    done = subprocess.run([sys.executable, "-c", FULL], env=BUFFERED, stderr=subprocess.PIPE, check=True)
    assert done.stderr == b"two\n"


def test_a_reader_that_is_gone_costs_all_lines_and_no_later_print_fails() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert logged(writer, then="print('result', flush=True)") == "goes on\n"
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
