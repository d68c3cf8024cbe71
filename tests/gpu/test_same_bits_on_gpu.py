"""The same bits on CUDA: gradients go through pinned buffers, workers share one GPU. Run by `make test-gpu`."""

from pathlib import Path

import pytest

from ..system.running import plain, run, run_until

SCRIPT = "everything.py"
ON_GPU = ("--device", "cuda", "--convolutions")


@pytest.mark.parametrize("precision", [(), ("--bf16",)])
def test_any_number_of_workers_and_any_plan_gives_the_bits_of_the_plain_script(
    precision: tuple[str, ...], tmp_path: Path
) -> None:
    sha = plain(SCRIPT, *ON_GPU, *precision)
    for options in (("--workers", "1"), ("--workers", "3"), ("--plan", "0:1,20:4,50:2,80:5")):
        outcome = run(SCRIPT, *options, home=tmp_path, args=(*ON_GPU, *precision))
        assert outcome.sha == sha, options
        assert outcome.result["bits"] == "same bits"
        outcome.assert_every_sample_once(epochs=6)


def test_a_run_killed_entirely_resumes_to_the_same_bits(tmp_path: Path) -> None:
    sha = plain(SCRIPT, *ON_GPU)
    run_until(SCRIPT, "iteration 40: checkpoint saved", "--workers", "2", home=tmp_path, args=ON_GPU)
    assert run(SCRIPT, "--resume", "--workers", "3", home=tmp_path, args=ON_GPU).sha == sha


def test_another_seed_gives_other_bits() -> None:
    assert plain(SCRIPT, *ON_GPU) != plain(SCRIPT, *ON_GPU, "--seed", "1")
