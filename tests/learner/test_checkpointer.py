"""How one member behaves towards a storage that fails: it warns, waits, and gives up late."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from resile_learner.messages import Message, Warned
from resile_learner.training import checkpoints
from resile_learner.training.checkpoints import Checkpointer, StorageGone
from resile_learner.training.session import SoloSession
from resile_learner.training.state import flatten


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


def test_the_final_model_is_waited_for_and_the_user_told_once(
    tmp_path: Path, session: StoredSession, checkpointer: Checkpointer
) -> None:
    obstacle = in_the_way(tmp_path, "model.safetensors")
    model = nn.Linear(2, 2)
    checkpointer.store_model(model)
    until(lambda: checkpointer.in_trouble)
    for _ in range(3):
        checkpointer.heard([])
        checkpointer.store_model(model)
        assert checkpointer.busy
    (told,) = session.warnings
    assert f"the final model is not stored yet in {tmp_path.as_uri()}: " in told
    assert "the job waits for it" in told
    remove(obstacle)
    until(lambda: not checkpointer.busy)
    assert (tmp_path / "model.safetensors").is_file()


def test_the_wait_for_the_final_model_has_an_end(
    tmp_path: Path, checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way(tmp_path, "model.safetensors")
    model = nn.Linear(2, 2)
    checkpointer.store_model(model)
    until(lambda: checkpointer.in_trouble)
    checkpointer.store_model(model)
    monkeypatch.setattr(checkpoints, "PATIENCE_SECONDS", 0.0)
    checkpointer._safe_since = float("inf")
    with pytest.raises(StorageGone, match=r"training is complete, but its end could not be stored .* resume from"):
        checkpointer.store_model(model)


def test_training_is_told_of_a_checkpoint_that_waits_and_goes_on(
    tmp_path: Path, session: StoredSession, checkpointer: Checkpointer
) -> None:
    obstacle = in_the_way(tmp_path, "checkpoints/000000000003-g1/part-00000")
    checkpointer.begin(3, flatten({"w": torch.ones(3)}))
    until(lambda: checkpointer.in_trouble)
    checkpointer.heard([])
    (told,) = session.warnings
    assert "checkpoint 000000000003-g1 is not stored yet" in told
    assert "(training goes on)" in told
    remove(obstacle)
    until(lambda: checkpointer.news()["stored"])
