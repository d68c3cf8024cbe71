"""What validations decide is decided alike by all workers: the best model, an early end, and learning rates."""

from pathlib import Path

import pytest

from .running import plain, run, run_until

pytestmark = pytest.mark.long

SCRIPT = "selected.py"
FIRST_EPOCHS = 3
"""Of the plain run, whose best model follows them; it ends three epochs later."""


@pytest.fixture(scope="module")
def sha() -> str:
    """The bits of the plain script, in one process, without any launcher."""
    return plain(SCRIPT)


def test_the_best_model_is_the_one_that_ends_a_run_at_its_epoch(sha: str) -> None:
    assert plain(SCRIPT, "--unselected", "--epochs", str(FIRST_EPOCHS)) == sha


@pytest.mark.parametrize(
    "options",
    [("--workers", "1"), ("--workers", "3"), ("--plan", "0:1,30:3,70:2,85:5")],
    ids=["1 worker", "3 workers", "a plan"],
)
def test_any_number_of_workers_keeps_the_same_model_and_ends_at_the_same_epoch(
    sha: str, options: tuple[str, str], tmp_path: Path
) -> None:
    outcome = run(SCRIPT, *options, home=tmp_path)
    assert outcome.sha == sha
    outcome.assert_every_sample_once(epochs=2 * FIRST_EPOCHS)


def test_a_schedule_by_epochs_has_the_same_bits_on_any_number_of_workers(tmp_path: Path) -> None:
    args = ("--schedule", "epoch", "--epochs", "4")
    assert run(SCRIPT, "--plan", "0:3,20:1,50:2", home=tmp_path, args=args).sha == plain(SCRIPT, *args)


def test_a_resumed_run_knows_the_best_model_and_how_long_it_has_waited(sha: str, tmp_path: Path) -> None:
    run_until(SCRIPT, "iteration 90: checkpoint saved", "--workers", "3", home=tmp_path)
    outcome = run(SCRIPT, "--resume", "--workers", "2", home=tmp_path)
    assert outcome.sha == sha
    assert outcome.sizes[-1][0] >= 90, "it went on from a checkpoint after the best model"
