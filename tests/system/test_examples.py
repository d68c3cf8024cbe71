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

from tests.learner.wheels import add_wheel, offline

from .pools import UpPool, pool_up
from .running import SCRIPTS, plain, run

pytestmark = pytest.mark.long
SECONDS = 300
"""Each worker imports the libraries by itself, which takes long on a machine that does much else."""

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
    options: tuple[str, ...] = ()
    """What `resile run` and `resile submit` need to know."""

    @property
    def script(self) -> Path:
        return EXAMPLES / self.name

    def arguments(self, outside: Path) -> tuple[str, ...]:
        """The arguments, with the folder of what is not the example's own."""
        return tuple(arg.replace("{outside}", str(outside)) for arg in self.args)

    @property
    def command(self) -> str:
        return " ".join((self.name, *self.args))


DIGITS = Example("digits.py", ("--epochs", "2"), epochs=2, iterations=16)
DIGITS_BF16 = Example("digits.py", ("--epochs", "2", "--bf16"), epochs=2, iterations=16)
GPT = Example("gpt.py", ("--kilobytes", "20", "--block", "32"), epochs=1, iterations=20)
ALL = [
    DIGITS,
    DIGITS_BF16,
    GPT,
    Example("ordinary_loop.py", (), epochs=5, iterations=120),
    Example("gan.py", (), epochs=3, iterations=60),
    Example("lbfgs.py", (), epochs=4, iterations=12),
    Example("weighted_sampler.py", (), epochs=5, iterations=75, is_drawn=True),
    Example("stream.py", (), epochs=4, iterations=76),
    Example("dataset.py", (), epochs=3, iterations=57, options=("--data", "digits")),
    Example("packages.py", (), epochs=2, iterations=38, options=("--with", "einops>=0.7")),
    Example("own_spans.py", (), epochs=3, iterations=87),
    Example("curves.py", ("--epochs", "2"), epochs=2, iterations=16),
    Example("transformers_trainer.py", (), epochs=2, iterations=40),
    Example("lightning_module.py", (), epochs=5, iterations=120),
    Example("accelerate_loop.py", (), epochs=5, iterations=120),
    Example("keras_fit.py", (), epochs=5, iterations=120),
    Example(
        "cifar10.py",
        ("--data", "{outside}/cifar", "--epochs", "2", "--batch-size", "24", "--num-shards", "6", "--depth", "1"),
        epochs=2,
        iterations=10,
    ),
]
EINOPS = """
def rearrange(images, pattern, p, q):
    assert pattern == "b (h p) (w q) -> b (h w) (p q)"
    batch, height, width = images.shape
    return images.reshape(batch, height // p, p, width // q, q).transpose(2, 3).reshape(batch, -1, p * q)
"""
"""What the example needs of this package, for an index without a network."""


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What examples need from outside: data that is registered, an index of packages, and the files of CIFAR-10."""
    folder = tmp_path_factory.mktemp("outside")
    write_cifar(folder / "cifar")
    subprocess.run([sys.executable, EXAMPLES / "dataset.py", "--write", folder / "digits"], check=True)
    add_wheel(folder / "wheels", "einops", "0.8.0", source=EINOPS)
    (folder / "packages").mkdir()
    (folder / "packages" / "einops.py").write_text(EINOPS)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in offline(folder / "wheels").items():
            patch.setenv(name, value)
        add = [sys.executable, "-m", "resile", "dataset", "add", "digits", folder / "digits", "--local"]
        subprocess.run(add, check=True, env={**os.environ, "RESILE_HOME": str(folder / "home")})
        yield folder


@cache
def plain_sha(example: Example, outside: Path, *more: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(outside / "packages"))
        patch.setenv("RESILE_DATASET_DIGITS", str(outside / "digits"))
        return plain(example.script, *example.arguments(outside), *more, seconds=SECONDS)


def in_ci(*names: str) -> list[Any]:
    """All examples as parameters: those with other ``names`` run nightly."""
    return [pytest.param(one, marks=() if one.name in names else pytest.mark.nightly) for one in ALL]


@pytest.mark.parametrize(
    "example", in_ci("ordinary_loop.py", "lightning_module.py"), ids=lambda example: example.command
)
def test_an_example_has_the_same_bits_as_a_plain_script_on_one_worker_on_three_and_on_two(
    example: Example, outside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--plan", "0:1,4:3,8:2", *example.options)
    elastic = run(example.script, *options, home=outside / "home", args=example.arguments(outside), seconds=SECONDS)
    assert elastic.sha == plain_sha(example, outside)
    assert elastic.sizes == [(0, 1), (4, 3), (8, 2)]
    assert elastic.result["iteration"] == example.iterations
    assert elastic.result["bits"] == "same bits"
    assert_exact(elastic.result["ledger"], example)


def assert_exact(ledger: dict[str, Any], example: Example) -> None:
    """Every sample was used once, or exactly as often as the sampler drew it."""
    assert [epoch["epoch"] for epoch in ledger["epochs"]] == list(range(example.epochs))
    for epoch in ledger["epochs"]:
        assert epoch.get("as_drawn", None) is (True if example.is_drawn else None)
        assert example.is_drawn == (epoch["once"] < epoch["samples"])


@pytest.fixture(scope="module")
def pool(outside: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpPool]:
    """A host of two slots."""
    with pool_up(tmp_path_factory.mktemp("pool") / "home", "--slots", 2) as pool:
        assert pool.run("dataset", "add", "digits", outside / "digits").status == 0
        yield pool


@pytest.mark.parametrize(
    "example",
    in_ci("ordinary_loop.py", "gan.py", "stream.py", "packages.py", "transformers_trainer.py", "lightning_module.py"),
    ids=lambda example: example.command,
)
def test_an_example_has_the_same_bits_in_a_pool_where_a_worker_is_killed(
    example: Example, outside: Path, pool: UpPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    killed = tmp_path / "killed"
    limits = ("--min-workers", 2, "--max-workers", 2)
    wrapped = ("--", killed, 7, example.script, *example.arguments(outside))
    job = pool.submit(SCRIPTS / "killed_once.py", *limits, *example.options, *wrapped)
    view = pool.completed(job)
    assert killed.exists()
    assert view["params_sha256"] == plain_sha(example, outside)
    assert view["bits"] == "same bits"
    assert_exact(pool.ask("ledger", job), example)


@pytest.mark.parametrize("example", [DIGITS, GPT], ids=lambda example: example.command)
def test_another_seed_gives_other_bits(example: Example, outside: Path) -> None:
    assert plain_sha(example, outside, "--seed", "1") != plain_sha(example, outside)


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


def write_cifar(folder: Path) -> None:
    """Make a folder as CIFAR-10 comes, with few images."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        images = generator.integers(256, size=(20, 3072), dtype=np.uint8)
        labels = generator.integers(10, size=20).tolist()
        write_batch(folder / name, {b"batch_label": name.encode(), b"data": images, b"labels": labels})


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    write_cifar(tmp_path / "cifar-10-batches-py")
    return tmp_path / "cifar-10-batches-py"


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
