"""A loop whose body runs once for each batch: the same bits and the same output, whoever joins, leaves or is killed."""

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest

from .running import Outcome, command, plain_output, run, run_until, sha_in
from .test_kills import attack

SCRIPT = "body.py"
EPOCHS = 3


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """What the plain script prints."""
    return plain_output(SCRIPT)


def numbers(output: str) -> list[str]:
    """The lines of the script, those of a worker that prints beside another one once."""
    return list(dict.fromkeys(re.findall(r"^.*?(\d+ -?\d+\.\d{6} \d\.\d{6})$", output, re.MULTILINE)))


@pytest.mark.parametrize("options", [("--workers", "3"), ("--plan", "0:2,4:5,11:1,17:3,23:2")])
def test_any_number_of_workers_gives_the_bits_of_the_plain_script(
    undisturbed: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    outcome = run(SCRIPT, *options, home=tmp_path)
    assert outcome.sha == sha_in(undisturbed)
    outcome.assert_every_sample_once(epochs=EPOCHS)
    if "--plan" in options:
        assert outcome.sizes == [tuple(map(int, step.split(":"))) for step in options[1].split(",")]
    assert sorted(numbers(outcome.errors)) == sorted(numbers(undisturbed))


def test_workers_that_are_killed_anywhere_in_the_body_change_nothing(undisturbed: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(SCRIPT, "--workers", "3", home=tmp_path, args=("--seconds", "0.4")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        struck = attack(process.pid, process.stderr, signal.SIGKILL, 4)
        out = process.stdout.read()
        outcome = Outcome(process.wait(60), json.loads(out) if out.strip() else {}, "")
    finally:
        process.kill()
        process.communicate()
    assert len(struck) == 4
    assert outcome.sha == sha_in(undisturbed)
    outcome.assert_every_sample_once(epochs=EPOCHS)


def test_a_run_killed_entirely_resumes_to_the_same_bits(undisturbed: str, tmp_path: Path) -> None:
    args = ("--seconds", "0.2")
    run_until(SCRIPT, "iteration 8: checkpoint saved", "--workers", "3", home=tmp_path, args=args)
    outcome = run(SCRIPT, "--resume", "--workers", "2", home=tmp_path, args=args)
    assert outcome.sha == sha_in(undisturbed)
    assert outcome.sizes[-1][0] >= 8, "it went on from the checkpoint"
    outcome.assert_every_sample_once(epochs=EPOCHS)
