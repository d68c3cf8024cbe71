"""A data connection that passes nothing on, between two live workers: the job goes on without waiting for minutes."""

import json
import subprocess
import sys
from pathlib import Path

from .conftest import TRAIN
from .running import run

SWALLOW = """
import ctypes, gc, os, socket, struct
from resile_learner.collectives.poller import LinkPoller

def swallow(peer):
    '''Drop all that arrives on the data connection to one peer, before TCP sees it, as a broken path does.'''
    poller = next(each for each in gc.get_objects() if isinstance(each, LinkPoller))
    if set(poller.links) != {1, 2}:
        return  # this is not worker 0
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0
    sock = socket.socket(fileno=os.dup(poller.links[peer].fileno()))
    sock.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HL", 1, ctypes.addressof(program)))  # SO_ATTACH_FILTER
    sock.close()

class Swallow(Callback):
    def on_iteration(self, loop, iteration):
        if iteration.number == 12:
            swallow(1)
"""


def test_a_broken_path_between_two_live_workers_costs_one_of_them(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    sha = subprocess.check_output([sys.executable, str(script)], text=True).split("sha ")[1].strip()
    script.write_text(
        TRAIN.replace("def datasets", SWALLOW + "\ndef datasets").replace("[Pause()]", "[Pause(), Swallow()]")
    )
    outcome = run(script, "--workers", "3", home=tmp_path / "home", args=("--pause", "0.05"))
    assert outcome.sha == sha
    reasons = [item["reason"] for item in outcome.result["history"]]
    assert any("according to its peers" in reason for reason in reasons), json.dumps(reasons)
