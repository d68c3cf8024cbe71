"""Whatever ends a run, nothing of it stays: no process, no shared memory, no temporary file."""

import os
import signal
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

GREEDY = """
import os, subprocess, tempfile, time
from multiprocessing import shared_memory
import torch
from torch import nn
from torch.utils.data import TensorDataset
from resile.training import Callback, ElasticModel

subprocess.Popen(["sleep", "1000"])
subprocess.Popen(["sleep", "1000"], start_new_session=True)
subprocess.run(["sh", "-c", "setsid sleep 1000 &"])
memory = shared_memory.SharedMemory(create=True, size=1000)
tempfile.NamedTemporaryFile(delete=False).write(b"x")

class Pause(Callback):
    def on_iteration(self, loop, iteration):
        if iteration.number == 2:
            print("training", flush=True)
        time.sleep(0.05)

data = TensorDataset(torch.zeros(4800, 4), torch.zeros(4800, dtype=torch.long))
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ElasticModel(
    model, lambda: (data, None), nn.CrossEntropyLoss(), optimizer, callbacks=[Pause()], num_workers=2
).train(batch_size=48, epochs=100, checkpoint_every=1)
"""


def marked(mark: str) -> dict[int, str]:
    """Every process that inherited ``mark`` in its environment, and its command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
    return found


def temporary_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("moment", ["imports", "training"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left(moment: str, number: signal.Signals, resile: Any, until: Callable[..., None]) -> None:
    mark = uuid.uuid4().hex
    shared_before = set(os.listdir("/dev/shm"))
    process = resile.start("run", resile.script(GREEDY), "-w", "2", RESILE_TEST_MARK=mark)
    awaited = {"imports": "run train-", "training": "training"}[moment]
    for line in process.stdout:
        if line.startswith(awaited):
            break
    else:
        raise AssertionError(process.stderr.read())
    if moment == "training":
        assert len(marked(mark)) > 8, "the launcher, the fork server, two workers, and what they started"
    process.send_signal(number)
    ended = resile.finish(process)
    assert ended.status == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number], ended.err
    assert "Traceback" not in ended.err

    until(lambda: marked(mark) == {})
    until(lambda: set(os.listdir("/dev/shm")) <= shared_before)  # other tests have some for a moment
    assert list(resile.temporary.iterdir()) == []
    half_written = [path for path in temporary_files(resile.home) if "#" in path.name or "partial" in path.name]
    assert half_written == []


def test_a_killed_fork_server_is_started_again_and_leaves_nothing_of_its_workers(
    resile: Any, until: Callable[..., None]
) -> None:
    mark = uuid.uuid4().hex
    script = resile.script(GREEDY.replace("epochs=100", "epochs=2"))
    process = resile.start("run", script, "-w", "2", "--json", RESILE_TEST_MARK=mark)
    for line in process.stderr:
        if line.startswith("training"):
            break
    before = marked(mark)
    (fork_server,) = (child.pid for child in psutil.Process(process.pid).children())
    os.kill(fork_server, signal.SIGKILL)
    for line in process.stderr:
        if "generation" in line:
            break

    def left() -> set[int]:
        """What workers started outside their sessions ends with the run."""
        return {pid for pid, line in marked(mark).items() if pid in before and "sleep" not in line}

    until(lambda: left() <= {process.pid})
    ended = resile.finish(process)
    assert ended.status == 0, ended.err
    assert [item["reason"] for item in ended.json["history"] if item["kind"] == "queued"] != []
    until(lambda: marked(mark) == {})


def test_a_second_ctrl_c_does_not_wait(resile: Any) -> None:
    text = GREEDY + "\n"
    process = resile.start("run", resile.script(text), "-w", "1")
    for line in process.stdout:
        if line.startswith("training"):
            break
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    assert resile.finish(process).status == 130


def test_a_completed_run_leaves_only_its_folder(resile: Any, until: Callable[..., None]) -> None:
    mark = uuid.uuid4().hex
    shared_before = set(os.listdir("/dev/shm"))
    ended = resile.run(
        "run",
        resile.script(GREEDY.replace("epochs=100", "epochs=1").replace("0.05", "0")),
        "-w",
        "2",
        RESILE_TEST_MARK=mark,
    )
    assert ended.status == 0, ended.err
    until(lambda: marked(mark) == {})
    until(lambda: set(os.listdir("/dev/shm")) <= shared_before)
    assert list(resile.temporary.iterdir()) == []
