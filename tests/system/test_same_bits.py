"""Promise 1 and 2: the same bits and every sample once, whatever the number of workers and whatever happens."""

from pathlib import Path

import pytest

from .running import plain, run, run_until

pytestmark = pytest.mark.long

SCRIPT = "everything.py"


@pytest.fixture(scope="module")
def sha() -> str:
    """The bits of the plain script, in one process, without any launcher."""
    return plain(SCRIPT)


def test_workers_whose_number_does_not_change_give_the_bits_of_the_plain_script(sha: str, tmp_path: Path) -> None:
    """More than there are cores. Fewer train in the plans below, from the beginning of a run on or later."""
    outcome = run(SCRIPT, "--workers", "8", home=tmp_path)
    assert outcome.sha == sha
    assert outcome.sizes == [(0, 8)]
    outcome.assert_every_sample_once(epochs=6)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("0:1,20:3,50:8,90:2", marks=pytest.mark.nightly),
        pytest.param("0:5,15:1,40:4", marks=pytest.mark.nightly),
        "0:2,10:7,25:3,60:12,100:1",
    ],
)
def test_any_plan_gives_the_same_bits_and_uses_every_sample_once(sha: str, plan: str, tmp_path: Path) -> None:
    outcome = run(SCRIPT, "--plan", plan, home=tmp_path)
    assert outcome.sha == sha
    assert outcome.sizes == [tuple(map(int, step.split(":"))) for step in plan.split(",")]
    outcome.assert_every_sample_once(epochs=6)


def test_a_run_killed_entirely_resumes_to_the_same_bits(sha: str, tmp_path: Path) -> None:
    run_until(SCRIPT, "iteration 40: checkpoint saved", "--workers", "3", home=tmp_path)
    outcome = run(SCRIPT, "--resume", "--workers", "2", home=tmp_path)
    assert outcome.sha == sha
    assert outcome.sizes[-1][0] >= 40, "it went on from the checkpoint"
    outcome.assert_every_sample_once(epochs=6)


@pytest.mark.nightly
def test_bf16_autocast_gives_bits_of_its_own_that_are_the_same_everywhere(sha: str, tmp_path: Path) -> None:
    one = plain(SCRIPT, "--bf16")
    assert one != sha
    assert run(SCRIPT, "--plan", "0:3,20:1,40:5", home=tmp_path, args=("--bf16",)).sha == one


def test_bits_differ_where_they_must(sha: str) -> None:
    assert plain(SCRIPT, "--seed", "1") != sha
    assert plain(SCRIPT, "--num-shards", "6") != sha


@pytest.mark.nightly
def test_data_from_worker_processes_gives_the_same_bits(sha: str, tmp_path: Path) -> None:
    outcome = run(SCRIPT, "--plan", "0:2,30:3", home=tmp_path, args=("--num-workers", "1"))
    assert outcome.sha == sha
    outcome.assert_every_sample_once(epochs=6)


def test_fast_mode_uses_every_sample_once_too(tmp_path: Path) -> None:
    outcome = run(SCRIPT, "--plan", "0:2,30:3", home=tmp_path, args=("--mode", "fast"))
    assert outcome.status == 0, outcome.errors
    assert outcome.result["bits"] == "fast"
    outcome.assert_every_sample_once(epochs=6)


@pytest.mark.nightly
def test_in_fast_mode_passes_of_few_samples_train_as_whole_shares_do(tmp_path: Path) -> None:
    """Whatever the number of workers, as far as rounding allows; the passes of 3 and of 5 workers are no even tree."""
    whole = run("micro_batches.py", "--workers", "1", home=tmp_path)
    cut = run("micro_batches.py", "--plan", "0:3,8:1,15:5,22:2", home=tmp_path, args=("--micro-batch-size", "4"))
    assert cut.status == 0, cut.errors
    assert cut.result["loss"] == pytest.approx(whole.result["loss"], rel=1e-4)
    cut.assert_every_sample_once(epochs=3)


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", ["AdamW", "NAdam"])
def test_unusual_layouts_dtypes_and_default_devices_give_the_bits_of_the_plain_script(
    optimizer: str, tmp_path: Path
) -> None:
    args = ("--optimizer", optimizer)
    # The last batch of an epoch has a single sample: worker 3 joins at it, and computes no shard of it.
    outcome = run("unusual.py", "--plan", "0:3,10:4,15:2,21:5", home=tmp_path, args=args)
    assert outcome.sha == plain("unusual.py", *args)
    assert outcome.result["bits"] == "same bits"
    outcome.assert_every_sample_once(epochs=3)
