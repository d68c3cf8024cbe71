"""A loop whose body runs once for each batch: the same bits and the same output, whoever joins, leaves or is killed."""

import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from .running import SCRIPTS, plain_output, run, run_attacked, run_until, sha_in
from .test_kills import attack

SCRIPT = "body.py"
VARIABLES = "variables.py"
EVERY_LINE = "every_line.py"
EPOCHS = 3


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """What the plain script prints."""
    return plain_output(SCRIPT)


NUMBERS = r"^.*?(\d+ -?\d+\.\d{6} \d\.\d{6})$"
"""A line of the script."""


def numbers(output: str) -> list[str]:
    """The lines of the script."""
    return re.findall(NUMBERS, output, re.MULTILINE)


@pytest.mark.parametrize("options", [("--workers", "3"), ("--plan", "0:2,4:5,11:1,17:3,23:2")])
def test_any_number_of_workers_gives_the_bits_of_the_plain_script(
    undisturbed: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    outcome = run(SCRIPT, *options, home=tmp_path)
    assert outcome.sha == sha_in(undisturbed)
    outcome.assert_every_sample_once(epochs=EPOCHS)
    if "--plan" in options:
        assert outcome.sizes == [tuple(map(int, step.split(":"))) for step in options[1].split(",")]
    assert numbers(outcome.errors) == numbers(undisturbed)


def test_workers_that_are_killed_anywhere_in_the_body_change_nothing(tmp_path: Path) -> None:
    """The run has as many slow iterations as four replacements take on a busy machine, and is fast after them."""
    epochs, done = 12, tmp_path / "done"
    lines: list[str] = []

    def noted(said: Iterable[str]) -> Iterator[str]:
        for line in said:
            lines.append(line)
            yield line

    outcome, struck = run_attacked(
        SCRIPT,
        "--workers",
        "3",
        home=tmp_path / "home",
        args=("--epochs", str(epochs), "--seconds", "1", "--fast-once", str(done)),
        attack=lambda launcher, said: attack(launcher, noted(said), signal.SIGKILL, 4, done=done),
    )
    assert len(struck) == 4
    plain = plain_output(SCRIPT, "--epochs", str(epochs))
    assert outcome.sha == sha_in(plain)
    assert numbers("".join(lines)) == numbers(plain)
    outcome.assert_every_sample_once(epochs=epochs)


@pytest.mark.long
@pytest.mark.parametrize(
    ("strike", "freeze_seconds"),
    [("SIGKILL", 0.0), ("SIGSTOP", 0.5), pytest.param("SIGSTOP", 6.0, marks=pytest.mark.nightly)],
)
def test_workers_that_are_struck_at_any_line_of_the_body_change_nothing(
    strike: str, freeze_seconds: float, tmp_path: Path
) -> None:
    """Each line of the body is struck once, when three workers train; six seconds are longer than a loss takes."""
    struck = tmp_path / "struck"
    struck.mkdir()
    epochs = ("--epochs", "30")
    args = (*epochs, "--strike", strike, "--freeze-seconds", str(freeze_seconds), "--struck", str(struck))
    outcome = run(EVERY_LINE, "--workers", "3", home=tmp_path / "home", args=args, seconds=600)
    plain = plain_output(EVERY_LINE, *epochs)
    assert outcome.sha == sha_in(plain)
    assert len(list(struck.iterdir())) == 16
    own_lines = r"^\d+ \d+ \S+ -?\d+\.\d{6}$"
    assert re.findall(own_lines, outcome.errors, re.MULTILINE) == re.findall(own_lines, plain, re.MULTILINE)
    outcome.assert_every_sample_once(epochs=30)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("made = maker(torch.randn(len(inputs), 4) * next(count))", "called the model with other inputs than"),
        ("loss = loss * next(count)", "computed another loss from the model's outputs than"),
    ],
)
def test_a_body_that_counts_by_an_iterator_is_named_when_a_worker_joins(line: str, says: str, tmp_path: Path) -> None:
    script = tmp_path / SCRIPT
    text = (
        (SCRIPTS / SCRIPT)
        .read_text()
        .replace("for _epoch in", "import itertools\ncount = itertools.count(1)\nfor _epoch in")
    )
    before, _, after = text.partition(line.split(" = ")[0] + " = ")
    first, _, rest = after.partition("\n")
    script.write_text(f"{before}{line.split(' = ')[0]} = {first}\n        {line}\n{rest}")
    outcome = run(script, "--plan", "0:2,4:3", home=tmp_path / "home")
    assert outcome.status == 1
    assert says in outcome.errors


def counted(output: str) -> set[str]:
    """The lines that a loop printed which counts, averages and collects."""
    return set(re.findall(r"((?:batch|after epoch) \d+: .*)$", output, re.MULTILINE))


def test_workers_that_join_know_the_variables_of_the_loop(tmp_path: Path) -> None:
    """Numbers, lists, objects, copies of the model, in functions and globals; what enumerate counts; epochs begun."""
    plain = plain_output(VARIABLES)
    outcome = run(VARIABLES, "--plan", "0:2,4:4,7:1,12:3,20:2", home=tmp_path)
    assert outcome.sha == sha_in(plain)
    assert outcome.sizes == [(0, 2), (4, 4), (7, 1), (12, 3), (20, 2)]
    assert counted(outcome.errors) == counted(plain)
    assert len(counted(plain)) == 27 + 3


def test_a_run_that_resumes_knows_the_variables_of_the_loop(tmp_path: Path) -> None:
    plain = plain_output(VARIABLES)
    args = ("--seconds", "0.2")
    run_until(VARIABLES, "iteration 14: checkpoint saved", "--workers", "2", home=tmp_path, args=args)
    outcome = run(VARIABLES, "--resume", "--workers", "3", home=tmp_path, args=args)
    assert outcome.sha == sha_in(plain)
    start = outcome.sizes[-1][0]
    assert start >= 14, "it went on from the checkpoint"
    assert counted(outcome.errors) == {line for line in counted(plain) if ends_at(line) > start}


def ends_at(line: str) -> int:
    """The iteration after which a line about a batch or an epoch is printed."""
    *kind, number = line.partition(":")[0].split()
    return (int(number) + 1) * (1 if kind == ["batch"] else 9)


@pytest.mark.parametrize("options", [("--workers", "3"), ("--plan", "0:2,2:5,4:1,6:3")])
def test_outputs_that_take_several_rounds_are_those_of_the_model(options: tuple[str, ...], tmp_path: Path) -> None:
    assert run("wide.py", *options, home=tmp_path).sha == sha_in(plain_output("wide.py"))


@pytest.mark.parametrize("options", [("--workers", "3"), ("--plan", "0:1,4:3")])
def test_workers_without_rows_of_a_call_know_that_it_is_computed_in_full(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    outcome = run("few_rows.py", *options, home=tmp_path)
    assert outcome.sha == sha_in(plain_output("few_rows.py"))
    assert outcome.errors.count("depends on the other samples of its batch") == 1


@pytest.mark.parametrize(
    ("args", "options", "most_reads"),
    [
        ((), ("--workers", "3"), 550),
        (("--readers", "1"), ("--plan", "0:1,2:3,5:2,8:4"), 650),
        (("--uses", "images"), ("--plan", "0:1,2:3,5:2,8:4"), None),
    ],
)
def test_workers_read_the_rows_of_their_shards(
    args: tuple[str, ...], options: tuple[str, ...], most_reads: int | None, tmp_path: Path
) -> None:
    """Of 4 times 96 samples, and some for what workers compare in their first iterations, or read ahead of joins."""
    read, alone = tmp_path / "read", tmp_path / "alone"
    read.mkdir(), alone.mkdir()
    outcome = run("own_rows.py", *options, home=tmp_path, args=(str(read), *args))
    assert outcome.sha == sha_in(plain_output("own_rows.py", str(alone), *args))
    outcome.assert_every_sample_once(epochs=4)
    num_read = sum(len(each.read_text().split()) for each in read.iterdir())
    says = outcome.errors.count("each worker reads all samples of a batch")
    if most_reads:
        assert num_read <= most_reads
    assert says == (0 if most_reads else 1)


def test_workers_that_join_know_what_a_model_keeps_that_is_computed_in_full(tmp_path: Path) -> None:
    """The hidden state of a recurrent model, from batch to batch."""
    outcome = run("situation.py", "--plan", "0:1,2:3,5:2,7:4", home=tmp_path, args=("carried_state",))
    assert outcome.sha == sha_in(plain_output("situation.py", "carried_state"))


STEPS = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import resile.training

resile.training.seed()
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = DataLoader(TensorDataset(torch.randn(240, 8), torch.arange(240) % 2), batch_size=24)
model, optimizer, loader = resile.training.prepare(model, optimizer, data, num_shards=6)
batches = ((inputs, targets) for _ in loader.epochs(100) for inputs, targets in loader)
for inputs, targets in batches:
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    if loader.iteration == 24:
        break
"""


def test_a_loop_that_counts_steps_ends_the_run_though_its_generator_is_kept(tmp_path: Path) -> None:
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    outcome = run(script, "--plan", "0:1,5:3", home=tmp_path / "home")
    assert outcome.sha == sha_in(plain_output(script))
    assert outcome.result["iteration"] == 25


def test_a_run_killed_entirely_resumes_to_the_same_bits(undisturbed: str, tmp_path: Path) -> None:
    args = ("--seconds", "0.2")
    run_until(SCRIPT, "iteration 8: checkpoint saved", "--workers", "3", home=tmp_path, args=args)
    outcome = run(SCRIPT, "--resume", "--workers", "2", home=tmp_path, args=args)
    assert outcome.sha == sha_in(undisturbed)
    assert outcome.sizes[-1][0] >= 8, "it went on from the checkpoint"
    outcome.assert_every_sample_once(epochs=EPOCHS)
