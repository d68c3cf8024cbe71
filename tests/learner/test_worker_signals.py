"""A SIGTERM to all processes has no effect on a worker and its DataLoader, but on other processes of a script."""

import signal
import subprocess
import sys

import pytest

BEFORE = """
import os, signal, time
import psutil
from torch.utils.data import DataLoader
from resile_learner.worker.signals import leave_signals_to_launcher

leave_signals_to_launcher()
"""
CASES = {
    "the worker": "os.kill(os.getpid(), signal.SIGTERM); print('goes on')",
    "its DataLoader": """
for number, batch in enumerate(DataLoader(range(64), batch_size=2, num_workers=2)):
    if number == 3:
        for child in psutil.Process().children():
            child.send_signal(signal.SIGTERM)
print('goes on' if number == 31 else number)
""",
}
STARTED = {
    "a fork": "child = os.fork() or signal.pause()",
    "a command": "import subprocess; child = subprocess.Popen(['sleep', '60']).pid",
    "a process of multiprocessing": """
import multiprocessing
process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
process.start()
child = process.pid
""",
}

ENDED = """
while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
    os.kill(child, signal.SIGTERM)
    time.sleep(0.01)
print(os.waitstatus_to_exitcode(ended[1]))
"""


def output(code: str) -> str:
    return subprocess.run([sys.executable, "-c", BEFORE + code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("case", CASES)
def test_what_trains_goes_on(case: str) -> None:
    assert output(CASES[case]) == "goes on\n"


@pytest.mark.parametrize("case", STARTED)
def test_what_a_script_starts_ends_as_usual(case: str) -> None:
    """It is signalled again, since it may not have begun to handle signals as usual when the first one comes."""
    assert output(STARTED[case] + ENDED) == f"{-signal.SIGTERM}\n"
