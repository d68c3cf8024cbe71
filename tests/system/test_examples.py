"""The examples do what their first lines promise: the same bits as plain scripts and with any number of workers."""

import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from .running import plain, run

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Example:
    """An example, made so short that it can be run a few times."""

    name: str
    args: tuple[str, ...]
    epochs: int
    iterations: int

    @property
    def script(self) -> Path:
        return EXAMPLES / self.name

    @property
    def command(self) -> str:
        return " ".join((self.name, *self.args))


DIGITS = Example("digits.py", ("--epochs", "2"), epochs=2, iterations=16)
DIGITS_BF16 = Example("digits.py", ("--epochs", "2", "--bf16"), epochs=2, iterations=16)
GPT = Example("gpt.py", ("--kilobytes", "20", "--block", "32"), epochs=1, iterations=20)


@cache
def plain_sha(example: Example, *more: str) -> str:
    return plain(example.script, *example.args, *more)


@pytest.mark.parametrize("example", [DIGITS, DIGITS_BF16, GPT], ids=lambda example: example.command)
def test_an_example_has_the_same_bits_as_a_plain_script_and_elastically(example: Example, tmp_path: Path) -> None:
    elastic = run(example.script, "--plan", "0:1,4:3,8:8", home=tmp_path, args=example.args)
    assert elastic.sha == plain_sha(example)
    assert elastic.sizes == [(0, 1), (4, 3), (8, 8)]
    assert elastic.result["iteration"] == example.iterations
    elastic.assert_every_sample_once(epochs=example.epochs)


@pytest.mark.parametrize("example", [DIGITS, GPT], ids=lambda example: example.command)
def test_another_seed_gives_other_bits(example: Example) -> None:
    assert plain_sha(example, "--seed", "1") != plain_sha(example)


def test_the_digits_are_learned() -> None:
    script = [sys.executable, str(DIGITS.script), "--epochs", "8"]
    out = subprocess.run(script, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r"validation accuracy ([\d.]+)%", out)
    assert found, out
    assert float(found[1]) > 97


def test_only_one_worker_writes_the_sample_of_the_gpt(tmp_path: Path) -> None:
    assert run(GPT.script, "--workers", "2", home=tmp_path, args=GPT.args).status == 0
    logs = [file.read_text() for file in tmp_path.glob("runs/*/logs/worker-*.log")]
    assert sorted("def " in log for log in logs) == [False, True]
