"""Workers that are stuck, slow or at fault in real runs: told apart, told with the reason, and no more than told."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from resile.local.events import Noted, Progressed, RunEvent
from resile.local.result import Result
from resile.local.run import LocalRun
from resile.local.settings import RunSettings

pytestmark = [pytest.mark.long, pytest.mark.alone]

SCRIPT = """
import ctypes, os, pathlib, sys, threading, time
import torch
from torch import nn
from resile.training import Callback, ElasticModel

act, epochs = sys.argv[1], int(sys.argv[2])
flag = pathlib.Path(sys.argv[3])
num_losses = 0

def is_chosen():
    "One worker of all, once."
    try:
        flag.open("x").write(str(os.getpid()))
    except FileExistsError:
        return False
    return True

class Samples(torch.utils.data.Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(size, 16, generator=generator)
        self.targets = (self.inputs[:, 0] * self.inputs[:, 1] > 0).long()
        self.is_slow = False

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        if self.is_slow:
            time.sleep(0.01)
        return self.inputs[index], self.targets[index]

samples = Samples(480)

def loss_fn(outputs, targets):
    global num_losses
    num_losses += 1
    if act == "first and last" and num_losses == 1:
        time.sleep(1.5)
    if act == "holds the lock" and num_losses == 20:
        ctypes.PyDLL(None).usleep(1_000_000)
    if act == "deadlocks" and num_losses > 20 and is_chosen():
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # for ever
    if act == "loops" and num_losses > 20 and is_chosen():
        while True:
            pass
    if act == "raises" and num_losses > 20 and is_chosen():
        raise ValueError("once")
    if act == "raises by its data" and num_losses > 20 and bool((targets[0] >= 0).item()):
        raise ValueError("always")
    if act == "waits for data" and num_losses == 20 and is_chosen():
        samples.is_slow = True
    if act in ("waits for data", "is slowed"):
        for _ in range(20):
            torch.randn(100, 100) @ torch.randn(100, 100)
    return nn.functional.cross_entropy(outputs, targets)

class Slow(Callback):
    def on_iteration(self, loop, iteration):
        if act == "first and last" and iteration.number == 8:
            time.sleep(1.5)

def accuracy(outputs, targets):
    if act == "first and last" and not torch.is_grad_enabled() and not model.training:
        time.sleep(1.5 if num_losses < 100 else 0)
    return (outputs.argmax(1) == targets).float().mean()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ElasticModel(
    model, lambda: (samples, Samples(48) if act == "first and last" else None), loss_fn, optimizer,
    metrics={"accuracy": accuracy}, callbacks=[Slow()],
).train(epochs=epochs, batch_size=48, num_shards=6)
"""
SECONDS = 90


class Stage:
    """Runs the script with an act, and keeps what is noted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.flag = folder / "flag"
        self.notes: list[str] = []
        self.chosen: int | None = None
        self.run: LocalRun
        (folder / "train.py").write_text(SCRIPT)

    @property
    def marked(self) -> int | None:
        """The living worker that the script chose."""
        pids = {pid: worker for worker, pid in self.run.pids.items()}
        return pids.get(int(self.flag.read_text() or 0)) if self.flag.exists() else None

    async def play(
        self,
        act: str,
        *,
        workers: int,
        detection_seconds: float = 3.0,
        epochs: int = 3,
        watch: Callable[[RunEvent], None] = lambda event: None,
    ) -> Result:
        settings = RunSettings(
            script=self.folder / "train.py",
            args=(act, str(epochs), str(self.flag)),
            workers=workers,
            home=self.folder / "home",
            detection_seconds=detection_seconds,
        )
        self.run = LocalRun(settings)

        def note(event: RunEvent) -> None:
            if isinstance(event, Noted):
                self.notes.append(event.text)
            watch(event)

        async with asyncio.timeout(SECONDS):
            return await self.run.run(note)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def reasons(result: Result) -> list[str]:
    return [item.reason for item in result.history if item.kind == "allocation"]


def sha(result: Result) -> str:
    assert result.completed is not None, result.outcome
    return result.completed.params_sha256


@pytest.mark.parametrize("act", ["deadlocks", "loops"])
async def test_a_stuck_worker_is_left_behind_and_the_result_stays_the_same(stage: Stage, act: str) -> None:
    expected = sha(await Stage(stage.folder).play("nothing", workers=1))
    result = await stage.play(act, workers=3, detection_seconds=0.25)
    assert sha(result) == expected
    assert any("failed: stuck in compute for" in reason for reason in reasons(result)), reasons(result)
    (note,) = [note for note in stage.notes if "stuck in compute" in note]
    assert "(train.py, line" in note
    assert "in loss_fn" in note, "it says where it was stuck"


async def test_a_worker_that_is_stuck_alone_ends_the_run(stage: Stage) -> None:
    result = await stage.play("deadlocks", workers=1, detection_seconds=0.05)
    assert "worker 0 on local/0 failed: stuck in compute for" in result.outcome.error
    assert "lock.acquire()  # for ever" in result.outcome.details


@pytest.mark.nightly
async def test_a_slow_first_iteration_callback_or_validation_is_not_taken_for_a_hang(stage: Stage) -> None:
    result = await stage.play("first and last", workers=1, detection_seconds=0.05)
    assert result.outcome.state == "completed", result.outcome
    assert stage.notes == []


@pytest.mark.nightly
async def test_a_call_that_holds_pythons_lock_for_less_than_detection_seconds_harms_nobody(stage: Stage) -> None:
    result = await stage.play("holds the lock", workers=2)
    assert reasons(result) == ["start"]


async def test_an_error_of_one_worker_is_forgiven(stage: Stage) -> None:
    expected = sha(await Stage(stage.folder).play("nothing", workers=1))
    result = await stage.play("raises", workers=3)
    assert sha(result) == expected
    assert any("failed: ValueError: once" in reason for reason in reasons(result))
    assert any("Traceback (most recent call last)" in note for note in stage.notes)


@pytest.mark.nightly
async def test_an_error_of_the_data_ends_the_run(stage: Stage) -> None:
    result = await stage.play("raises by its data", workers=3)
    assert result.outcome.state == "failed"
    assert "ValueError: always" in result.outcome.error
    assert "in loss_fn" in result.outcome.details


async def until_told(
    stage: Stage, act: str, text: str, disturb: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)
) -> str:
    """Run until a note contains ``text``; return that note. ``disturb`` goes on beside it once it trains."""
    training = asyncio.Event()
    told: list[str] = []

    def watch(event: RunEvent) -> None:
        if isinstance(event, Progressed):
            training.set()
        if isinstance(event, Noted) and text in event.text:
            told.append(event.text)
            stage.chosen = stage.marked
            stage.run.stop()

    async def disturb_when_training() -> None:
        await training.wait()
        await disturb()

    disturbing = asyncio.create_task(disturb_when_training())
    try:
        result = await stage.play(act, workers=3, epochs=100_000, watch=watch)
    finally:
        disturbing.cancel()
        await asyncio.wait([disturbing])
    assert result.outcome.state == "stopped", result.outcome
    return told[0]


@pytest.mark.nightly
async def test_who_waits_for_its_data_is_told(stage: Stage) -> None:
    note = await until_told(stage, "waits for data", "waits for its data")
    assert note.startswith(f"worker {stage.chosen} takes ")


@pytest.mark.nightly
async def test_who_is_kept_from_its_processor_is_told(stage: Stage) -> None:
    worker = 2

    async def slow() -> None:
        """Let it run a fifth of the time."""
        pid = stage.run.pids[worker]
        try:
            while True:
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(0.04)
                os.kill(pid, signal.SIGCONT)
                await asyncio.sleep(0.01)
        finally:
            if worker in stage.run.pids:
                os.kill(pid, signal.SIGCONT)

    note = await until_told(stage, "is slowed", f"worker {worker} takes", slow)
    assert "other processes use its processor" in note
