"""The demo: what it keeps of a run, when it is satisfied, and what it answers when it is not."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from resile.cli import demo, main
from resile.demo import story
from resile.demo.chart import draw
from resile.demo.recording import WINDOW, Recording, Stretch
from resile.demo.story import Run
from resile.demo.verdict import faults
from resile_learner.local.events import Progressed, Rescaled
from resile_learner.local.history import HistoryItem
from resile_learner.local.plan import Step, parse_plan
from resile_learner.local.result import Result
from resile_learner.local.seam import Outcome
from resile_learner.messages import Completed, EpochCount, Progress

SHORT = parse_plan("0:1,10:3,20:2")


def recorded(plan: tuple[Step, ...] = SHORT, *, iterations: int = 40, loss: float = 1.0) -> Recording:
    """A run of ``iterations`` iterations that trains as many in a second as it has workers."""
    recording, seconds, workers = Recording(), 0.0, 0
    sizes = {step.iteration: step.workers for step in plan}
    for number in range(iterations):
        if number in sizes:
            recording.add(Rescaled(1, workers, sizes[number], number, 0.0), seconds=seconds)
            workers = sizes[number]
        seconds += 1 / workers
        progress = Progress(worker=0, generation=1, iteration=number + 1, epoch=0, loss=loss / (number + 1))
        recording.add(Progressed(progress, workers), seconds=seconds)
    return recording


def completed(name: str, plan: tuple[Step, ...] = SHORT, **changes: object) -> Run:
    """A run of the demo that ended well, but for ``changes`` of its last words."""
    last = Completed(
        worker=0,
        generation=len(plan),
        iteration=40,
        epoch=1,
        samples_seen=10,
        loss=1.0,
        metrics={},
        model=None,
        params_sha256="1234" * 16,
        validation={"accuracy": 0.99},
        ledger=(EpochCount(epoch=0, samples=10, once=10, more=0, never=0),),
        bits="same bits",
    )
    history = tuple(
        HistoryItem(n, 0.0, "allocation", n, step.workers, (), step.iteration, "") for n, step in enumerate(plan)
    )
    result = Result(
        job=f"demo-{name}-123456",
        name=name,
        outcome=Outcome("completed"),
        min_workers=1,
        max_workers=3,
        workers=plan[-1].workers,
        generation=len(plan),
        seconds=1.0,
        ready=None,
        progress=None,
        checkpoint=None,
        completed=last.model_copy(update=changes),
        history=history,
        model=None,
        logs="",
        can_resume=False,
    )
    return Run(name, plan, result, recorded(plan))


def test_a_recording_knows_who_trained_when() -> None:
    assert recorded().stretches() == [Stretch(0, 10, 1), Stretch(10, 20, 3), Stretch(20, 40, 2)]


def test_speeds_are_those_of_one_number_of_workers() -> None:
    recording = recorded()
    for stretch in recording.stretches():
        speeds = list(recording.speeds(stretch))
        assert speeds[-1].iteration == stretch.last
        assert all(speed.iteration - stretch.first >= WINDOW for speed in speeds)
        assert [speed.per_second for speed in speeds] == pytest.approx([stretch.workers] * len(speeds))


def test_progress_told_twice_is_kept_once() -> None:
    recording = recorded()
    before = list(recording.points)
    recording.add(Progressed(Progress(worker=0, generation=3, iteration=40, epoch=0, loss=1.0), 2), seconds=1e9)
    assert recording.points == before


def test_two_runs_that_end_alike_are_as_they_should_be() -> None:
    assert faults(completed("elastic"), completed("undisturbed", parse_plan("0:1"))) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"params_sha256": "0" * 64}, "the parameters differ"),
        ({"bits": "bits not guaranteed: aten::foo"}, "bits not guaranteed: aten::foo"),
        ({"ledger": ()}, "no ledger"),
        (
            {"ledger": (EpochCount(epoch=0, samples=10, once=8, more=1, never=1),)},
            "8 were used once, 1 more often, 1 never",
        ),
    ],
)
def test_what_is_not_as_it_should_be_is_named(changes: dict[str, object], says: str) -> None:
    found = faults(completed("elastic", **changes), completed("undisturbed"))
    assert len(found) == 1
    assert says in found[0]


def test_a_plan_that_was_not_followed_is_a_fault() -> None:
    other = replace(completed("elastic"), plan=parse_plan("0:1,10:4"))
    assert faults(other, completed("undisturbed")) == [
        "the elastic run was to follow the plan 0:1,10:4, and did 0:1,10:3,20:2"
    ]


def test_losses_that_differ_are_a_fault() -> None:
    other = replace(completed("elastic"), recording=recorded(loss=1.5))
    assert faults(other, completed("undisturbed")) == ["the losses differ, first at iteration 1"]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw(recorded(), recorded(parse_plan("0:1")), title="a title", file=tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_fails_when_the_bits_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {"elastic": completed("elastic"), "undisturbed": completed("undisturbed", params_sha256="0" * 64)}
    monkeypatch.setattr(demo, "train", lambda name, plan, **rest: runs[name])
    assert main(["demo", "-o", str(tmp_path / "demo.png")]) == 1
    out = capsys.readouterr().out
    assert "WRONG: the parameters differ" in out
    assert "SAME BITS" not in out


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sklearn" else object())
    assert main(["demo"]) == 2
    fault = capsys.readouterr().err
    assert "the demo needs scikit-learn: install with" in fault
    assert fault.count("\n") == 1


@pytest.mark.parametrize("name", ["picture.jpg", "not-a-folder/demo.png", "folder.png"])
def test_a_picture_that_cannot_be_written_is_refused_first(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "not-a-folder").write_text("")
    (tmp_path / "folder.png").mkdir()
    assert main(["demo", "-o", str(tmp_path / name)]) == 2
    fault = capsys.readouterr().err
    assert name in fault
    assert fault.count("\n") == 1


def test_the_demo_trains_twice_and_finds_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(story, "ARGUMENTS", ("--epochs", "3"))
    monkeypatch.setattr(demo, "ELASTIC", parse_plan("0:1,6:3,12:2"))
    picture = tmp_path / "new" / "demo.png"
    assert main(["demo", "--home", str(tmp_path), "-o", str(picture), "--json"]) == 0
    out, err = capfd.readouterr()
    told = json.loads(out)
    assert told["faults"] == []
    assert told["elastic"]["params_sha256"] == told["undisturbed"]["params_sha256"]
    assert "SAME BITS" in err
    assert picture.exists()
