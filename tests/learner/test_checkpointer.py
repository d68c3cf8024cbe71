"""How one member behaves towards a storage that fails: it warns, waits, and gives up late."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import nn

from resile_learner.checkpoint import checkpointer as module
from resile_learner.checkpoint.checkpointer import Checkpointer, StorageGone
from resile_learner.messages import Message, Warned
from resile_learner.session import SoloSession
from resile_learner.state.run import RunState


class StoredSession(SoloSession):
    """A plain run that has storage, and what it reports."""

    def __init__(self, storage: str) -> None:
        super().__init__()
        self.storage = storage  # type: ignore[assignment]
        self.warnings: list[str] = []

    def report(self, message: Message) -> None:
        assert isinstance(message, Warned)
        self.warnings.append(message.message)


@pytest.fixture
def session(tmp_path: Path) -> StoredSession:
    return StoredSession(tmp_path.as_uri())


@pytest.fixture
def checkpointer(session: StoredSession) -> Iterator[Checkpointer]:
    checkpointer = Checkpointer(session, every=None)
    yield checkpointer
    checkpointer.close()


def until(condition: Callable[[], object]) -> None:
    for _ in range(3000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never came")


def in_the_way(folder: Path, name: str) -> Path:
    """Something that keeps an object from being written, for root as well."""
    obstacle = folder / name
    obstacle.mkdir(parents=True)
    (obstacle / "file").touch()
    return obstacle


def remove(obstacle: Path) -> None:
    (obstacle / "file").unlink()
    obstacle.rmdir()


def test_the_final_model_is_waited_for_and_the_user_warned_once(
    tmp_path: Path, session: StoredSession, checkpointer: Checkpointer
) -> None:
    obstacle = in_the_way(tmp_path, "model.safetensors")
    model = nn.Linear(2, 2)
    checkpointer.store_model(model)
    until(lambda: checkpointer.is_failing)
    for _ in range(3):
        checkpointer.on_headers([])
        checkpointer.store_model(model)
        assert checkpointer.is_busy
    (warning,) = session.warnings
    assert f"the final model is not stored yet in {tmp_path.as_uri()}: " in warning
    assert "the job is waiting for it" in warning
    remove(obstacle)
    until(lambda: not checkpointer.is_busy)
    assert (tmp_path / "model.safetensors").is_file()


def test_the_wait_for_the_final_model_has_an_end(
    tmp_path: Path, checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way(tmp_path, "model.safetensors")
    model = nn.Linear(2, 2)
    checkpointer.store_model(model)
    until(lambda: checkpointer.is_failing)
    checkpointer.store_model(model)
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.0)
    checkpointer._safe_since = float("inf")
    with pytest.raises(StorageGone, match=r"training is complete, but its result could not be stored .* resume from"):
        checkpointer.store_model(model)


def test_training_continues_with_a_warning_while_a_checkpoint_cannot_be_stored(
    tmp_path: Path, session: StoredSession, checkpointer: Checkpointer
) -> None:
    obstacle = in_the_way(tmp_path, "checkpoints/000000000003-g1/part-00000")
    checkpointer.begin(3, RunState(nn.Linear(3, 1), {}, {}, after_load=lambda: None))
    until(lambda: checkpointer.is_failing)
    checkpointer.on_headers([])
    (warning,) = session.warnings
    assert "checkpoint 000000000003-g1 is not stored yet" in warning
    assert "(training continues)" in warning
    remove(obstacle)
    until(lambda: checkpointer.header_fields().stored)
