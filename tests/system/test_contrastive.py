"""Losses that compare the samples of a batch with each other are those of plain PyTorch, on any number of workers."""

import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from .running import plain, plain_output, run, run_attacked
from .test_kills import workers

pytestmark = pytest.mark.long

SCRIPT = "contrastive.py"
KINDS = ["simclr", "clip"]


def losses(output: str) -> list[str]:
    return re.findall(r"loss (\d+\.\d{5})", output)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_printed_losses_are_those_of_plain_pytorch(kind: str, tmp_path: Path) -> None:
    expected, found = tmp_path / "plain.pt", tmp_path / "found.pt"
    plainly = plain_output(SCRIPT, kind, "--plain", "--write", str(expected))
    elastic = plain_output(SCRIPT, kind, "--write", str(found))
    for name, value in torch.load(expected).items():
        torch.testing.assert_close(torch.load(found)[name], value, rtol=1e-5, atol=1e-5)
    assert losses(elastic) == losses(plainly)
    assert len(losses(elastic)) == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--workers", "2"), marks=pytest.mark.nightly),
        pytest.param(("--workers", "3"), marks=pytest.mark.nightly),
        pytest.param(("--workers", "5"), marks=pytest.mark.nightly),
        ("--plan", "0:2,4:5,9:1,15:3"),
    ],
    ids=" ".join,
)
def test_any_number_of_workers_gives_the_same_bits(kind: str, options: tuple[str, ...], tmp_path: Path) -> None:
    outcome = run(SCRIPT, *options, home=tmp_path, args=(kind,))
    assert outcome.sha == plain(SCRIPT, kind)
    assert "computes the model in full" not in outcome.errors


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_worker_changes_nothing(kind: str, tmp_path: Path) -> None:
    def kill_one(launcher: int, said: Iterable[str]) -> list[str]:
        struck: list[str] = []
        for line in said:
            if not struck and "iteration 0: 3 workers" in line:
                os.kill(workers(launcher)[-1], signal.SIGKILL)
                struck.append(line)
        return struck

    args = (kind, "--seconds", "0.3")
    outcome, struck = run_attacked(SCRIPT, "--workers", "3", home=tmp_path, args=args, attack=kill_one)
    assert len(struck) == 1
    assert outcome.sha == plain(SCRIPT, kind)
    assert len(outcome.sizes) > 1
