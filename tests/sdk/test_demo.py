"""The demo: what it keeps of the story, when it is satisfied, and what it answers when it is not."""

import importlib.util
from datetime import UTC, datetime
from pathlib import Path

import pytest

from resile.cli import main
from resile.demo.chart import draw
from resile.demo.idle import Idle, idle_slots
from resile.demo.recording import Recording, Stretch
from resile.demo.report import html
from resile.demo.story import NUM_SLOTS, Part
from resile.demo.verdict import Ending, endings, faults
from resile_shared.http.api import HostView, JobView
from resile_shared.messages.hosts import HostState
from resile_shared.messages.jobs import HistoryItem, JobState
from resile_shared.messages.reports import EpochCount

BEGAN = 1_700_000_000.0
SHA = "1234" * 16
PART = Part("job 1", (), (8, 3))


def item(number: int, kind: str, *, seconds: float, workers: int, iteration: int) -> HistoryItem:
    return HistoryItem(
        number=number,
        time=datetime.fromtimestamp(BEGAN + seconds, UTC),
        kind=kind,
        generation=number,
        workers=workers,
        iteration=iteration,
    )


HISTORY = (
    item(1, "accepted", seconds=0, workers=0, iteration=0),
    item(2, "allocation", seconds=5, workers=8, iteration=0),
    item(3, "priority", seconds=6, workers=8, iteration=11),
    item(4, "allocation", seconds=7, workers=2, iteration=12),
    item(5, "allocation", seconds=8, workers=3, iteration=15),
    item(6, "completed", seconds=20, workers=3, iteration=40),
)


def job(**changes: object) -> JobView:
    """A job of the story that ended well, but for ``changes``."""
    view = JobView(
        id="job-1",
        name="job 1",
        tenant="default",
        state=JobState.COMPLETED,
        reason="",
        priority=5000,
        min_workers=1,
        max_workers=8,
        workers=0,
        slots=(),
        generation=5,
        iteration=40,
        iterations_total=40,
        epoch=0,
        epochs=1,
        samples_seen=10,
        loss=0.5,
        metrics={},
        validation={"loss": 0.34651, "accuracy": 0.99},
        iteration_seconds=None,
        seconds_left=None,
        submitted=HISTORY[0].time,
        bits="same bits",
        params_sha256=SHA,
        script="digits.py",
        args=(),
        group="",
        checkpoint=None,
        history=HISTORY,
        ledger=(EpochCount(epoch=0, samples=10, once=10, more=0, never=0),),
    )
    return view.model_copy(update=changes)


def recorded(view: JobView) -> Recording:
    recording = Recording(BEGAN)
    for seconds in range(5, 21):
        look = view.model_copy(update={"iteration": 3 * (seconds - 5), "loss": 1.0 / seconds})
        recording.add([look], now=BEGAN + seconds)
    return recording


def ending(**changes: object) -> Ending:
    view = job(**changes)
    return endings([PART], [view], recorded(view), [SHA])[0]


def test_a_recording_knows_who_trained_when() -> None:
    assert recorded(job()).stretches(job()) == [
        Stretch(5, 7, 0, 12, 8),
        Stretch(7, 8, 12, 15, 2),
        Stretch(8, 20, 15, 40, 3),
    ]


def test_a_job_that_was_not_seen_to_move_is_kept_once() -> None:
    recording = recorded(job())
    before = list(recording.points["job-1"])
    recording.add([job(iteration=46)], now=BEGAN + 30)
    recording.add([job(iteration=46)], now=BEGAN + 31)
    assert [point.seconds for point in recording.points["job-1"][len(before) :]] == [30]


def test_a_story_that_went_as_told_has_no_faults_whatever_short_shapes_it_passed_through() -> None:
    assert list(faults(ending())) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"params_sha256": "0" * 64}, "differ from those of an undisturbed run"),
        ({"bits": "bits not guaranteed: aten::foo"}, "bits not guaranteed: aten::foo"),
        ({"ledger": ()}, "the ledger of job 1 does not show"),
        ({"ledger": (EpochCount(epoch=0, samples=10, once=9, more=1, never=0),)}, "the ledger of job 1 does not show"),
        ({"history": (HISTORY[0], HISTORY[1], HISTORY[5])}, "should train with 8, 3 workers"),
    ],
)
def test_what_is_not_as_it_should_be_is_named(changes: dict[str, object], says: str) -> None:
    (fault,) = faults(ending(**changes))
    assert says in fault


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    view = job()
    other = view.model_copy(update={"id": "job-2"})
    recording = recorded(view)
    recording.points["job-2"] = recording.points["job-1"]
    ended = [Ending(PART, each, recording.stretches(each), SHA) for each in (view, other)]
    draw(ended, recording, slots=NUM_SLOTS, title="two jobs", file=tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_is_one_file_with_the_steps_and_the_sums() -> None:
    view = job()
    other = view.model_copy(update={"id": "job-2"})
    recording = recorded(view)
    recording.points["job-2"] = recording.points["job-1"]
    recording.note("<host-2> is killed", now=BEGAN + 7)
    ended = [Ending(PART, each, recording.stretches(each), SHA) for each in (view, other)]
    report = html(ended, recording, [], slots=NUM_SLOTS, title="two jobs & a pool")
    assert report.count("<svg") == 3
    assert "&lt;host-2&gt; is killed" in report
    assert report.count(SHA) == 4
    assert "in 1 of 1 epochs" in report
    assert "loss 0.3465, accuracy 99.00%" in report
    assert "Same bits" in report
    outside = report.replace("http://www.w3.org/2000/svg", "")
    assert not any(mark in outside for mark in ("http:", "https:", "<script", "<link", "src=", "url(", "@import"))
    assert "Wrong: a &lt;fault&gt;" in html(ended, recording, ["a <fault>"], slots=NUM_SLOTS, title="")


def test_idle_slots_are_those_that_nobody_held_and_not_those_of_a_dead_host() -> None:
    def look(seconds: float, *incarnations: int, states: str = "up up") -> None:
        hosts = [
            HostView.model_construct(
                id=f"host-{n}", state=HostState(state), incarnation=incarnation, slots=(1, 2, 3, 4)
            )
            for n, (incarnation, state) in enumerate(zip(incarnations, states.split(), strict=True))
        ]
        recording.add_hosts(hosts, now=BEGAN + seconds)

    recording = Recording(BEGAN)
    look(0, 1, 1)
    one = [Stretch(5, 10, 0, 1, 8), Stretch(12, 20, 0, 1, 3), Stretch(20, 30, 0, 1, 4), Stretch(30, 40, 0, 1, 8)]
    assert idle_slots([one, []], recording) == Idle(2 * 8 + 8 * 5 + 10 * 4, 35 * 8)
    recording.killed.add(("host-1", 1))
    look(20, 1, 1)
    look(23, 1, 1, states="up lost")
    look(28, 1, 2)
    assert recording.slots == [(0, 8), (20, 4), (28, 8)]
    assert idle_slots([one, []], recording) == Idle(2 * 8 + 8 * 5 + 2 * 4, 35 * 8 - 8 * 4)
    assert idle_slots([], recording).share == 0


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sklearn" else found(name))
    assert main(["demo"]) == 2
    assert "the demo requires scikit-learn: install with" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["demo.jpg", "folder.png", "/proc/none/demo.png"])
def test_a_picture_that_cannot_be_written_is_refused_first(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.png").mkdir()
    assert main(["demo", "-o", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.startswith("resile: -o ")
