"""What validations decide is decided alike by all workers: the best model, an early end, and learning rates."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from .running import plain, plain_output, run, run_until, sha_in

pytestmark = pytest.mark.long

SCRIPT = "selected.py"
EPOCH_ITERATIONS = 20
PATIENCE = 3
"""So many epochs after the best one the run ends."""


@dataclass(frozen=True)
class PlainRun:
    """The plain script, in one process, without any launcher."""

    sha: str
    best: int
    """How many epochs its best model has seen. That depends on the processor."""
    losses: list[float]
    """Of the validation after each epoch."""


@pytest.fixture(scope="module")
def alone() -> PlainRun:
    output = plain_output(SCRIPT)
    found = re.search(r"Best\(epoch=(\d+)", output)
    assert found, output
    losses = [float(loss) for loss in re.findall(r"validation loss ([0-9.]+)", output)]
    return PlainRun(sha_in(output), int(found[1]) + 1, losses)


def test_the_best_model_is_the_one_that_ends_a_run_at_its_epoch(alone: PlainRun) -> None:
    assert plain(SCRIPT, "--unselected", "--epochs", str(alone.best)) == alone.sha
    assert alone.losses[alone.best - 1] == min(alone.losses)
    assert len(alone.losses) == alone.best + PATIENCE


def test_any_number_of_workers_keeps_the_same_model_and_ends_at_the_same_epoch(alone: PlainRun, tmp_path: Path) -> None:
    outcome = run(SCRIPT, "--plan", "0:1,15:3,45:2,60:5", home=tmp_path)
    assert outcome.sha == alone.sha
    outcome.assert_every_sample_once(epochs=alone.best + PATIENCE)


@pytest.mark.nightly
def test_a_schedule_by_epochs_has_the_same_bits_on_any_number_of_workers(tmp_path: Path) -> None:
    args = ("--schedule", "epoch", "--epochs", "4")
    assert run(SCRIPT, "--plan", "0:3,20:1,50:2", home=tmp_path, args=args).sha == plain(SCRIPT, *args)


@pytest.mark.nightly
def test_a_resumed_run_knows_the_best_model_and_how_long_it_has_waited(alone: PlainRun, tmp_path: Path) -> None:
    after_best = EPOCH_ITERATIONS * alone.best + 30
    run_until(SCRIPT, f"iteration {after_best}: checkpoint saved", "--workers", "3", home=tmp_path)
    outcome = run(SCRIPT, "--resume", "--workers", "2", home=tmp_path)
    assert outcome.sha == alone.sha
    assert outcome.sizes[-1][0] >= after_best, "it went on from a checkpoint after the best model"
