"""The examples do what their first lines promise: the same bits as plain scripts and with any number of workers."""

import os
import pickle
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .pools import UpPool, pool_up
from .running import SCRIPTS, plain, run

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Example:
    """An example, made so short that it can be run a few times."""

    name: str
    args: tuple[str, ...]
    epochs: int
    iterations: int
    is_drawn: bool = False
    """Whether a sampler draws samples more than once, or not at all."""

    @property
    def script(self) -> Path:
        return EXAMPLES / self.name

    @property
    def command(self) -> str:
        return " ".join((self.name, *self.args))


DIGITS = Example("digits.py", ("--epochs", "2"), epochs=2, iterations=16)
DIGITS_BF16 = Example("digits.py", ("--epochs", "2", "--bf16"), epochs=2, iterations=16)
GPT = Example("gpt.py", ("--kilobytes", "20", "--block", "32"), epochs=1, iterations=20)

ORDINARY = Example("ordinary_loop.py", (), epochs=5, iterations=120)
GAN = Example("gan.py", (), epochs=3, iterations=120)
LBFGS = Example("lbfgs.py", (), epochs=4, iterations=12)
WEIGHTED = Example("weighted_sampler.py", (), epochs=5, iterations=75, is_drawn=True)
LIGHTNING = Example("lightning_module.py", (), epochs=5, iterations=120)
STREAM = Example("stream.py", (), epochs=4, iterations=76)
ALL = [DIGITS, DIGITS_BF16, GPT, ORDINARY, GAN, LBFGS, WEIGHTED, STREAM]


@cache
def plain_sha(example: Example, *more: str) -> str:
    return plain(example.script, *example.args, *more)


@pytest.mark.parametrize("example", ALL, ids=lambda example: example.command)
def test_an_example_has_the_same_bits_as_a_plain_script_and_elastically(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    elastic = run(example.script, "--plan", "0:1,4:3,8:8", home=tmp_path, args=example.args)
    assert elastic.sha == plain_sha(example)
    assert elastic.sizes == [(0, 1), (4, 3), (8, 8)]
    assert elastic.result["iteration"] == example.iterations
    assert_exact(elastic.result["ledger"], example)


def assert_exact(ledger: dict[str, Any], example: Example) -> None:
    """Every sample was used once, or exactly as often as the sampler drew it."""
    assert [epoch["epoch"] for epoch in ledger["epochs"]] == list(range(example.epochs))
    for epoch in ledger["epochs"]:
        assert epoch.get("as_drawn", None) is (True if example.is_drawn else None)
        assert example.is_drawn == (epoch["once"] < epoch["samples"])


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpPool]:
    """A host of two slots."""
    with pool_up(tmp_path_factory.mktemp("pool") / "home", "--slots", 2) as pool:
        yield pool


@pytest.mark.parametrize("example", [LBFGS, WEIGHTED, STREAM, LIGHTNING], ids=lambda example: example.command)
def test_an_example_has_the_same_bits_in_a_pool_where_a_worker_is_killed(
    example: Example, pool: UpPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    killed = tmp_path / "killed"
    wrapped = ("--", killed, 25, example.script, *example.args)
    job = pool.submit(SCRIPTS / "killed_once.py", "--min-workers", 2, "--max-workers", 2, *wrapped)
    view = pool.completed(job)
    assert killed.exists()
    assert view["params_sha256"] == plain_sha(example)
    assert view["bits"] == "same bits"
    assert_exact(pool.ask("ledger", job), example)


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


class Python2Pickler(pickle._Pickler):  # type: ignore[misc]
    """Writes strings of bytes as Python 2 did, and so as the files of CIFAR-10 have them."""

    def save_bytes(self, value: bytes) -> None:
        self.write(pickle.BINSTRING + struct.pack("<i", len(value)) + value)
        self.memoize(value)

    dispatch = {**pickle._Pickler.dispatch, bytes: save_bytes}  # noqa: RUF012


def write_batch(file: Path, content: object) -> None:
    with file.open("wb") as opened:
        Python2Pickler(opened, protocol=2).dump(content)
    file.write_bytes(file.read_bytes().replace(b"numpy._core.", b"numpy.core."))


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    """A folder as CIFAR-10 comes, with few images."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        images = generator.integers(256, size=(20, 3072), dtype=np.uint8)
        labels = generator.integers(10, size=20).tolist()
        write_batch(folder / name, {b"batch_label": name.encode(), b"data": images, b"labels": labels})
    return folder


def test_cifar10_has_the_same_bits_as_a_plain_script_and_elastically(cifar: Path, tmp_path: Path) -> None:
    args = ("--data", str(cifar), "--epochs", "2", "--batch-size", "24", "--num-shards", "6", "--depth", "1")
    elastic = run(EXAMPLES / "cifar10.py", "--plan", "0:3,4:1,6:2", home=tmp_path / "home", args=args)
    assert elastic.sha == plain(EXAMPLES / "cifar10.py", *args)
    assert elastic.sizes == [(0, 3), (4, 1), (6, 2)]
    assert elastic.result["iteration"] == 10
    elastic.assert_every_sample_once(epochs=2)


def test_cifar10_says_which_folder_is_missing(tmp_path: Path) -> None:
    ended = run(EXAMPLES / "cifar10.py", "--workers", "1", home=tmp_path, args=("--data", "nowhere"))
    assert ended.status == 1
    assert re.search(r"there is no folder /\S*nowhere: unpack cifar-10-python.tar.gz", ended.errors.splitlines()[-1])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (os.getcwd, "it wants posix.getcwd, which no array needs"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, "images and labels do not fit together"),
        ({}, "b'data'"),
    ],
)
def test_cifar10_reads_nothing_but_images(content: object, why: str, cifar: Path) -> None:
    write_batch(cifar / "data_batch_3", content)
    script = [sys.executable, str(EXAMPLES / "cifar10.py"), "--data", str(cifar)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == f"{cifar / 'data_batch_3'} is not a file of CIFAR-10: {why}"
