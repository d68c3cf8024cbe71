"""The command line: what it accepts, what it answers to mistakes, and how it shows a run."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resile.cli import main, with_resume_value
from resile.cli.app import command
from resile.cli.display import Display, Pace, PlainScreen
from resile.cli.run import summary
from resile.cli.tables import clock
from resile.local.events import Noted, Printed, Progressed, Rescaled, RunEvent, RunOpened, Saved, TrainingCalled
from resile.local.result import Outcome, Result
from resile_shared.messages.jobs import HistoryItem, JobRecord, JobSpec, JobState
from resile_shared.messages.message import at
from resile_shared.messages.reports import CheckpointSaved, Completed, EpochCount, Progress, Ready


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text("pass\n")
    return file


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("resile ")


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    out = capsys.readouterr().out
    assert "resile run train.py --plan 0:1,50:4,120:3" in out
    assert "Arguments of the script, after `--`" in out


@pytest.mark.parametrize("name", sorted(command.commands))
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"Usage: resile {name}" in out
    assert "\\b" not in out


def test_shells_can_complete_commands() -> None:
    asked = {"_RESILE_COMPLETE": "complete_bash", "COMP_WORDS": "resile dra", "COMP_CWORD": "1"}
    out = subprocess.check_output([sys.executable, "-m", "resile"], env={**os.environ, **asked}, text=True)
    assert out.split() == ["drain"]


def test_the_launcher_never_loads_torch() -> None:
    code = "import sys, resile.cli.run, resile.cli.app; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_lists_each_command_in_one_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = re.findall(r"^  ([a-z]+) +[A-Z]", capsys.readouterr().out.partition("\nTrain:\n")[2], re.MULTILINE)
    assert sorted(listed) == sorted(command.commands)


def test_help_imports_nothing_that_takes_time() -> None:
    code = "import sys; from resile.cli import main; main(['--help']); print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert "resile.cli.app" in modules
    assert {"aiohttp", "nats", "resile_shared.bus.subjects", "resile_shared.messages.jobs"}.isdisjoint(modules)


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        (["run", "a.py", "--resume"], ["run", "a.py", "--resume="]),
        (["run", "--resume", "a.py"], ["run", "--resume=", "a.py"]),
        (["run", "--resume", "train-7f3a2c", "a.py"], ["run", "--resume=train-7f3a2c", "a.py"]),
        (["run", "--resume=x", "a.py"], ["run", "--resume=x", "a.py"]),
        (["run", "a.py", "--", "--resume"], ["run", "a.py", "--", "--resume"]),
    ],
)
def test_resume_takes_a_value_only_if_it_is_a_run(arguments: list[str], changed: list[str]) -> None:
    assert with_resume_value(arguments) == changed


MISTAKES = [
    (["run"], "Missing argument 'SCRIPT'"),
    (["run", "{script}", "--lr", "3"], "put options of the script after `--`"),
    (["nonsense"], "No such command 'nonsense'"),
    (["run", "--resume", "xx", "{script}"], "--resume xx: 'xx' is not the id of a run, such as train-1a2b3c"),
    (["run", "{script}", "--workers", "many"], "valid integer"),
    (["run", "{script}", "--workers", "0"], "--workers 0: a run on this machine has 1 to"),
    (["run", "{script}", "--workers", "-3"], "--workers -3: a run on this machine has 1 to"),
    (["run", "{folder}/none.py"], "there is no script {folder}/none.py"),
    (["run", "{folder}"], "{folder} is a folder: name the script file in it"),
    (["run", "{script}", "--plan", "1:1"], "--plan '1:1': it starts at iteration 1, not at 0"),
    (["run", "{script}", "--plan", ""], "it is empty"),
    (["run", "{script}", "--plan", "0:2", "--workers", "3"], "contradict each other"),
    (["run", "{script}", "--env", "X"], "--env X: there is no variable X in this environment"),
    (["run", "{script}", "--env", "PYTHONHASHSEED=1"], "it is always 0"),
    (["run", "{script}", "-o", "{folder}"], "-o {folder} is a folder: name a file in it"),
    (["run", "{script}", "-o", "{folder}/no/model"], "there is no folder {folder}/no"),
    (["run", "{script}", "--home", "{script}"], "the home folder {script} cannot be used"),
    (["run", "{script}", "--code", "new"], "--code new says with which code a run is resumed: add --resume"),
    (["run", "{script}", "--resume", "--code", "newest"], "--code newest: the code to resume with is old or new"),
    (["run", "{script}", "--home", "{folder}/h", "--resume"], "there is no run of {script} in {folder}/h to resume"),
    (["run", "{script}", "--home", "{folder}/h", "--resume=../../etc"], "there is no run '../../etc'"),
]


@pytest.mark.parametrize(("arguments", "answer"), MISTAKES)
def test_a_mistake_is_answered_with_one_line(
    arguments: list[str], answer: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"script": str(script), "folder": str(script.parent)}
    assert main([argument.format(**places) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("resile: ")
    assert answer.format(**places) in captured.err


def test_with_json_a_mistake_is_an_object_too(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(script), "--plan", "x", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["state"] == "failed"
    assert "--plan 'x'" in document["error"]


def test_other_systems_are_told_what_works_there(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert main(["run", str(script)]) == 2
    assert f"`resile run` needs Linux, and this is darwin: `python {script}` trains" in capsys.readouterr().err


def test_a_home_of_a_newer_version_is_refused(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = script.parent / "home"
    home.mkdir()
    (home / "format").write_text("99\n")
    assert main(["run", str(script), "--home", str(home)]) == 2
    assert "has format '99'" in capsys.readouterr().err


class Paper:
    """A screen that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.done: list[tuple[int, int, str]] = []
        self.closed = False

    def line(self, text: str) -> None:
        self.lines.append(text)

    def printed(self, text: str, *, to_stderr: bool) -> None:
        self.lines.append(f"{'err' if to_stderr else 'out'}: {text}")

    def progress(self, done: int, total: int, text: str, *, is_milestone: bool) -> None:
        self.done.append((done, total, text))

    def close(self) -> None:
        self.closed = True


READY = Ready(iterations_total=120, num_shards=6, batch_size=48, epochs=6, samples=960, bits="same bits")
PROGRESS = Progress(iteration=50, epoch=2, loss=0.123456)


def events() -> Iterator[RunEvent]:
    yield RunOpened("train-7f3a2c", "/home/runs/train-7f3a2c", is_resumed=False)
    yield TrainingCalled(READY)
    yield Rescaled(1, 0, 1, 0, 0.5, "start")
    yield Printed(0, "stdout", "hello", is_lowest_rank=True)
    yield Printed(1, "stdout", "hello", is_lowest_rank=False)
    yield Printed(0, "stderr", "careful", is_lowest_rank=True)
    yield Printed(1, "stderr", "careful", is_lowest_rank=False)
    yield Rescaled(2, 1, 4, 50, 0.0123, "plan 50:4")
    yield Progressed(PROGRESS, workers=4)
    yield Saved(CheckpointSaved(lineage=1, iteration=50, num_bytes=2_500_000))
    yield Noted("something")


def test_a_run_is_shown_in_the_order_of_its_events() -> None:
    paper = Paper()
    with Display(paper, quiet=False) as display:
        for event in events():
            display(event)
    assert paper.lines == [
        "run train-7f3a2c in /home/runs/train-7f3a2c",
        "120 iterations: 6 epochs of 960 samples, batches of 48 in 6 shards",
        "iteration 0: 1 worker (generation 1): start",
        "out: hello",
        "err: careful",
        "err: [worker 1] careful",
        "iteration 50: 1 -> 4 workers (generation 2, pause 12 ms): plan 50:4",
        "iteration 50: checkpoint saved (2.5 MB)",
        "note: something",
    ]
    assert paper.done == [(50, 120, "epoch 2  4 workers  loss 0.1235")]
    assert paper.closed


def test_a_stream_that_is_longer_than_estimated_is_not_shown_beyond_its_end() -> None:
    paper = Paper()
    with Display(paper, quiet=False) as display:
        display(TrainingCalled(READY.model_copy(update={"iterations_total": 40, "has_fixed_length": False})))
        display(Progressed(PROGRESS, workers=4))
    assert paper.done == [(50, 50, "epoch 2  4 workers  loss 0.1235")]


@pytest.mark.parametrize(("num_epochs", "shown"), [(6, [1, 2, 3, 4, 5, 6]), (230, [*range(3, 229, 3), 230])])
def test_without_a_terminal_there_is_a_line_for_each_epoch_and_at_most_a_hundred(
    num_epochs: int, shown: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    with Display(PlainScreen(to_stderr=False), quiet=False) as display:
        display(TrainingCalled(READY.model_copy(update={"epochs": num_epochs, "iterations_total": 2 * num_epochs})))
        for iteration in range(1, 2 * num_epochs + 1):
            epoch, is_last = divmod(iteration - 1, 2)
            display(Progressed(Progress(iteration=iteration, epoch=epoch, ends_epoch=bool(is_last)), workers=1))
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[1] for line in lines] == [f"{2 * epoch}/{2 * num_epochs}" for epoch in shown]


def test_a_resumed_run_says_which_variables_begin_anew() -> None:
    paper = Paper()
    with Display(paper, quiet=False) as display:
        display(RunOpened("train-7f3a2c", "/home/runs/train-7f3a2c", is_resumed=True))
    assert paper.lines == [
        "resuming train-7f3a2c in /home/runs/train-7f3a2c",
        "note: variables of the script begin anew, except those around a prepared loader's loops and in state={...}",
    ]


def test_quiet_shows_only_what_the_script_prints() -> None:
    paper = Paper()
    with Display(paper, quiet=True) as display:
        for event in events():
            display(event)
        display.note("stopping")
    assert paper.lines == ["out: hello", "err: careful", "err: [worker 1] careful"]
    assert not paper.done


def test_the_pace_is_that_of_the_last_seconds() -> None:
    pace = Pace()
    assert pace.per_second is None
    for second in range(30):
        pace.add(second * 2 if second < 15 else 30 + (second - 15) * 10, now=float(second))
    assert pace.per_second == pytest.approx(10)
    assert pace.seconds_left(50) == pytest.approx(5)


@pytest.mark.parametrize(("seconds", "text"), [(7.2, "7 s"), (59.7, "1:00"), (185, "3:05"), (3750, "1:02:30")])
def test_times_are_readable(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def completed(*ledger: EpochCount) -> Completed:
    return Completed(
        iteration=120,
        epoch=5,
        samples_seen=5760,
        loss=0.25,
        metrics={"accuracy": 0.9},
        validation={"loss": 0.3},
        params_sha256="ab" * 32,
        model="models/lineage-1.safetensors",
        ledger=ledger,
        bits="same bits",
    )


def result(done: Completed | None, outcome: Outcome) -> Result:
    item = HistoryItem(
        number=1,
        time=at(1767323045.678),
        kind="allocation",
        generation=1,
        workers=2,
        slots=("local/0", "local/1"),
        iteration=0,
        reason="start",
    )
    record = JobRecord(
        job="train-7f3a2c",
        spec=JobSpec(name="train", package="/", script="/train.py"),
        state=JobState(outcome.state),
        priority=5000,
        submitted=at(0),
        generation=2,
        num_items=1,
        ready=READY,
        completed=done,
    )
    return Result(
        record=record,
        history=(item,),
        name="train",
        outcome=outcome,
        min_workers=1,
        max_workers=4,
        seconds=75.0,
        progress=PROGRESS,
        model="/m.safetensors" if done else None,
        logs="/logs",
        output=None,
        can_resume=False,
    )


def test_a_summary_folds_a_ledger_in_which_all_is_well() -> None:
    done = completed(EpochCount(epoch=0, samples=960, once=960, more=0, never=0))
    lines = list(summary(result(done, Outcome("completed"))))
    assert lines[0].split() == ["run", "train-7f3a2c,", "1:15"]
    assert any("every sample exactly once in every epoch" in line for line in lines)
    assert any("accuracy 0.9" in line for line in lines)
    assert any("ab" * 32 in line for line in lines)


def test_a_summary_names_the_epochs_in_which_something_is_wrong() -> None:
    counts = [EpochCount(epoch=e, samples=960, once=960 - e, more=0, never=e) for e in range(3)]
    lines = [line for line in summary(result(completed(*counts), Outcome("completed"))) if "epoch " in line]
    assert len(lines) == 2
    assert "epoch 2: of 960 samples 958 were used once, 0 more often, 2 never" in lines[1]


def test_the_json_of_a_completed_run_has_every_field() -> None:
    count = EpochCount(epoch=0, samples=960, once=960, more=0, never=0)
    document = result(completed(count), Outcome("completed")).as_json()
    assert document["ledger"] == {"epochs": [count.model_dump()]}
    assert document["params_sha256"] == "ab" * 32
    assert document["iterations_total"] == 120
    assert document["priority"] == 5000
    assert document["workers"] == 2
    assert document["error"] is None
    assert document["history"][0] == {
        "number": 1,
        "time": "2026-01-02T03:04:05.678Z",
        "kind": "allocation",
        "generation": 1,
        "workers": 2,
        "slots": ["local/0", "local/1"],
        "iteration": 0,
        "reason": "start",
    }


def test_the_json_of_a_failed_run_says_how_far_it_came() -> None:
    document = result(None, Outcome("failed", "worker 1 was killed")).as_json()
    assert document["state"] == "failed"
    assert document["error"] == "worker 1 was killed"
    assert document["params_sha256"] is None
    assert document["iteration"] == 50
    assert document["bits"] is None, "nothing is promised"
    assert result(None, Outcome("stopped")).as_json()["bits"] == "same bits"
