"""What a supervisor says beside its work never ends that."""

import os
import subprocess
import sys

LOGGING = """
import os, sys
from resile.cli.options import logger_beside

log = logger_beside(as_json=False)
log("one")
os.dup2(os.open(sys.argv[1], os.O_WRONLY), 1)
log("two")
log("three")
print("goes on", file=sys.stderr)
os._exit(0)
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
