"""A batch that changes while workers come, go and are killed: the bits are those of the batches, every sample once."""

import signal
from pathlib import Path

import pytest

from .running import SCRIPTS, Outcome, run, run_attacked, run_until
from .test_kills import attack

pytestmark = pytest.mark.long

SCRIPT = "everything.py"
BATCHES = "0:48,30:144,45:24"
EPOCHS = 4
ARGS = ("--epochs", str(EPOCHS), "--batch-range", "24", "192")


@pytest.fixture(scope="module")
def sha(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bits of one worker with these batches."""
    outcome = run(SCRIPT, "--workers", "1", "--batches", BATCHES, home=tmp_path_factory.mktemp("home"), args=ARGS)
    check(outcome)
    return outcome.sha


def check(outcome: Outcome) -> None:
    assert outcome.status == 0, outcome.errors
    assert outcome.result["batches"] == [
        {"iteration": int(first), "batch_size": int(size)}
        for first, size in (step.split(":") for step in BATCHES.split(","))
    ]
    assert not any("batch_size" in item for item in outcome.result["history"]), "the scheduler had no part in it"
    assert outcome.result["iterations_total"] == outcome.result["iteration"]
    outcome.assert_every_sample_once(epochs=EPOCHS)


def test_workers_and_batches_change_and_a_worker_is_killed_in_between(sha: str, tmp_path: Path) -> None:
    text = (SCRIPTS / SCRIPT).read_text()
    script = tmp_path / SCRIPT
    script.write_text(text.replace("return self.x[index]", "__import__('time').sleep(0.003); return self.x[index]"))
    outcome, killed = run_attacked(
        script,
        *("--plan", "0:1,10:3,40:2", "--batches", BATCHES),
        home=tmp_path / "home",
        args=ARGS,
        attack=lambda launcher, said: attack(launcher, said, signal.SIGKILL, 1),
    )
    check(outcome)
    assert outcome.sha == sha
    assert len(killed) == 1
    assert (40, 2) in outcome.sizes


@pytest.mark.nightly
def test_a_run_that_is_resumed_goes_on_with_its_batches(sha: str, tmp_path: Path) -> None:
    run_until(
        SCRIPT, "iteration 40: checkpoint saved", "--workers", "3", "--batches", BATCHES, home=tmp_path, args=ARGS
    )
    outcome = run(SCRIPT, "--resume", "--workers", "2", home=tmp_path)
    check(outcome)
    assert outcome.sha == sha


def test_another_schedule_has_other_bits(sha: str, tmp_path: Path) -> None:
    assert run(SCRIPT, "--workers", "2", "--batches", "0:48,31:144,45:24", home=tmp_path, args=ARGS).sha != sha


def test_batches_that_the_script_does_not_allow_are_an_error_in_one_line(tmp_path: Path) -> None:
    outcome = run(SCRIPT, "--workers", "1", "--batches", "0:48,9:96", home=tmp_path)
    assert outcome.status != 0
    assert "the training call has one of 48 and no batch_range" in outcome.result["error"]
