"""A plain ``python train.py``: what it prints in place of an agent, and how it ends."""

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from resile_learner.lone_training import StartedSeveralTimes
from resile_learner.messages import Completed, Progress, Ready, Warned
from resile_learner.session import LEFT_EARLY, PreparedLoop, SecondTrainingCall, SoloSession, View
from resile_learner.state.run import RunState
from resile_shared.errors import UsageError


def progress(**fields: Any) -> Progress:
    return Progress(worker=0, generation=1, iteration=10, epoch=1, **fields)


COMPLETED = Completed(
    worker=0,
    generation=1,
    iteration=10,
    epoch=1,
    samples_seen=160,
    loss=None,
    metrics={},
    validation={},
    params_sha256="a5",
    model=None,
    ledger=(),
    bits="the same in every run but for the order of sets",
)


class Loop:
    """A loop in a script, which the script has left."""

    missing_gradients = "the gradients are there after the last shard"

    def __init__(self, refusal: UsageError | None = None) -> None:
        self.is_complete = False
        self._refusal = refusal

    def complete_if_left(self) -> None:
        raise AssertionError

    def complete(self) -> None:
        if self._refusal is not None:
            raise self._refusal
        self.is_complete = True


def session_of(loop: PreparedLoop | None) -> SoloSession:
    session = SoloSession()
    session.prepared = loop
    return session


def test_a_worker_has_its_place_among_the_members_of_a_generation() -> None:
    view = View(generation=3, workers=(2, 5, 7), me=5)
    assert (view.rank, view.size) == (1, 3)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (progress(loss=0.5, ends_epoch=True), "epoch 2: iteration 10, loss 0.5000"),
        (progress(ends_epoch=True), "epoch 2: iteration 10"),
        (
            progress(loss=0.5, metrics={"accuracy": 0.25}, validation={"loss": 1}, ends_epoch=True),
            "epoch 2: iteration 10, loss 0.5000, accuracy 0.2500, validation loss 1.0000",
        ),
        (Warned(worker=0, message="the storage is slow"), "warning: the storage is slow"),
        (COMPLETED, "completed: params_sha256 a5"),
    ],
)
def test_epochs_warnings_and_the_end_are_printed(
    message: Progress | Warned | Completed, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    session = SoloSession()
    session.caveats = ()
    session.report(message)
    assert capsys.readouterr().err == line + "\n"


def test_what_the_bits_depend_on_is_printed_with_them(capsys: pytest.CaptureFixture[str]) -> None:
    session = SoloSession()
    session.caveats = ("the order of sets",)
    session.report(COMPLETED)
    assert capsys.readouterr().err == f"completed: params_sha256 a5, {COMPLETED.bits}\n"


def test_progress_within_an_epoch_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    SoloSession().report(progress(loss=0.5))
    assert capsys.readouterr().err == ""


def test_a_run_that_ended_in_its_last_iteration_is_completed_when_the_script_ends() -> None:
    loop = Loop()
    session_of(loop).on_script_end()
    assert loop.is_complete


@pytest.mark.parametrize(("loop", "reason"), [(None, LEFT_EARLY), (Loop(UsageError("it was left")), "it was left")])
def test_a_run_that_was_left_early_says_so_when_the_script_ends(
    loop: Loop | None, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    session_of(loop).on_script_end()
    assert capsys.readouterr().err == f"{reason}. With several workers this is an error\n"


@pytest.mark.parametrize("ends", ["complete", "failed"])
def test_the_end_of_a_script_is_none_of_a_run_that_has_ended(ends: str, capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop()
    session = session_of(loop)
    if ends == "complete":
        session.report(COMPLETED)
        capsys.readouterr()
    else:
        session.failure = UsageError("it failed")
    session.on_script_end()
    assert not loop.is_complete
    assert capsys.readouterr().err == ""


def raised(error: BaseException) -> BaseException:
    """``error``, as it ends a script that reads gradients."""
    try:
        gradients = type("Parameter", (), {"grad": None})
        assert gradients.grad is not None, error
    except AssertionError:
        return error.with_traceback(sys.exc_info()[2])
    raise AssertionError


@pytest.mark.parametrize(
    ("loop", "error", "hint"),
    [
        (Loop(), raised(AttributeError("'NoneType' has no attribute 'norm'")), Loop.missing_gradients),
        (None, raised(AttributeError("'NoneType' has no attribute 'norm'")), ""),
        (Loop(), RuntimeError("unable to allocate shared memory"), "use num_workers=0"),
        (Loop(), ValueError("x"), ""),
    ],
)
def test_an_error_that_ends_a_script_is_explained_and_the_run_is_not_completed(
    loop: Loop | None,
    error: BaseException,
    hint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    session_of(loop).on_script_end()
    printed = capsys.readouterr().err
    assert printed.endswith(f"{hint}\n") if hint else printed == ""
    assert loop is None or not loop.is_complete


def test_a_script_has_one_training_call() -> None:
    session = SoloSession()
    ready, state = cast(Ready, None), cast(RunState, None)  # neither is looked at
    assert session.join(ready, state)
    with pytest.raises(SecondTrainingCall):
        session.join(ready, state)
    session.failure = UsageError("this session ends with its test")


def test_one_of_several_plain_processes_does_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher has started them: each would train the whole model by itself."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(StartedSeveralTimes, match="started as one of 3 processes"):
        SoloSession().join(cast(Ready, None), cast(RunState, None))


SCRIPT = """
import sys
from resile_learner.session import closed_at_exit, current_session

def loop(name, is_too_late=sys.is_finalizing):
    try:
        yield
    finally:
        print("closed too late" if is_too_late() else "closed", name)

def start(name):
    generator = closed_at_exit(loop(name))
    next(generator)
    return generator

current_session().join(None, None)
assert current_session() is current_session()
ended = start("a loop that has ended")
del ended
held = [start("outer"), start("inner")]
print("the script ends")
"""


def test_loops_that_are_open_when_a_script_ends_are_closed_in_order(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "closed a loop that has ended",
        "the script ends",
        "closed inner",
        "closed outer",
    ]
    assert done.stderr == f"{LEFT_EARLY}. With several workers this is an error\n"
