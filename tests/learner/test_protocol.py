"""What a member does around its iterations: it resumes, ends epochs, pauses, and completes, in a real training run."""

from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resile.training import ElasticLoop, ElasticModel, Result, prepare, seed
from resile_learner.checkpoint.manifest import CheckpointId
from resile_learner.messages import CheckpointSaved, Completed, Message, Progress, Switched
from resile_learner.session import SoloSession, View, complete_left, enter_session
from resile_shared.storage.objects import ObjectStorage

from .test_training_call import alone, data

M = TypeVar("M", bound=Message)
SIZE = 40
ITERATIONS = 3
"""In an epoch."""


class Stored(SoloSession):
    """A member of one, which has storage."""

    def __init__(self, folder: Path, *, lineage: int = 1, resume: bool = False) -> None:
        super().__init__()
        self.storage = folder.as_uri()  # type: ignore[assignment]
        self.resume = resume  # type: ignore[assignment]
        self.view = View(generation=lineage, workers=(0,), me=0, lineage=lineage)  # type: ignore[misc]
        self.messages: list[Message] = []

    def report(self, message: Message) -> None:
        self.messages.append(message)
        super().report(message)

    def reports(self, kind: type[M]) -> list[M]:
        return [message for message in self.messages if isinstance(message, kind)]


def train(session: SoloSession, *, epochs: int, validation: TensorDataset | None = None, **settings: Any) -> Result:
    """Train a model whose bits depend on the random numbers of each iteration."""

    def run() -> Result:
        enter_session(session)
        seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        elastic = ElasticModel(model, lambda: (data(SIZE), validation), nn.functional.cross_entropy, optimizer)
        return elastic.train(epochs=epochs, batch_size=16, **settings)

    result = alone(run)
    assert isinstance(result, Result)
    return result


def test_a_run_that_resumes_goes_on_from_its_checkpoint_to_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    first = Stored(tmp_path)
    whole = train(first, epochs=2, checkpoint_every=ITERATIONS)
    assert [saved.iteration for saved in first.reports(CheckpointSaved)] == [ITERATIONS, 2 * ITERATIONS]
    ObjectStorage(tmp_path.as_uri()).delete_folder(f"checkpoints/{CheckpointId(1, 2 * ITERATIONS, 1).name}/")
    again = Stored(tmp_path, lineage=2, resume=True)
    result = train(again, epochs=2)
    assert [message.iteration for message in again.reports(Switched)] == [ITERATIONS]
    assert result == whole


def draw(session: SoloSession, **settings: Any) -> list[float]:
    """Train with a loop that draws a random number before each iteration; return these."""

    def run() -> list[float]:
        enter_session(session)
        seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = ElasticLoop(model, optimizer, data(SIZE), epochs=2, batch_size=16, **settings)
        drawn = []
        for iteration in loop:
            drawn.append(float(torch.rand(())))
            for inputs, targets in iteration.shards():
                iteration.backward(nn.functional.cross_entropy(model(inputs), targets))
            if iteration.exchange():
                optimizer.step()
        return drawn

    drawn = alone(run)
    assert isinstance(drawn, list)
    return drawn


def test_what_a_script_draws_between_iterations_does_not_depend_on_where_it_resumed(tmp_path: Path) -> None:
    whole = draw(Stored(tmp_path), checkpoint_every=ITERATIONS)
    assert len(set(whole)) == 2 * ITERATIONS
    ObjectStorage(tmp_path.as_uri()).delete_folder(f"checkpoints/{CheckpointId(1, 2 * ITERATIONS, 1).name}/")
    assert draw(Stored(tmp_path, lineage=2, resume=True)) == whole[ITERATIONS:]


def test_a_run_that_is_not_to_resume_begins_at_the_beginning(tmp_path: Path) -> None:
    first = train(Stored(tmp_path), epochs=1, checkpoint_every=1)
    again = Stored(tmp_path, lineage=2)
    assert train(again, epochs=1).params_sha256 == first.params_sha256
    assert [message.iteration for message in again.reports(Switched)] == [0]


def test_a_run_ends_once_its_checkpoints_and_its_model_are_stored_and_reported(tmp_path: Path) -> None:
    session = Stored(tmp_path)
    result = train(session, epochs=1, checkpoint_every=ITERATIONS)
    (saved,) = session.reports(CheckpointSaved)
    assert saved.iteration == ITERATIONS
    (completed,) = session.reports(Completed)
    assert session.messages[-1] == completed
    assert completed.params_sha256 == result.params_sha256
    assert completed.model == "models/lineage-1.safetensors"
    assert completed.model in ObjectStorage(tmp_path.as_uri()).sizes("models/")
    assert [(count.once, count.more, count.never) for count in completed.ledger] == [(SIZE, 0, 0)]


def test_a_loop_whose_body_is_a_whole_batch_takes_the_checkpoints_that_are_due_and_no_others(tmp_path: Path) -> None:
    session = Stored(tmp_path)

    def run() -> None:
        enter_session(session)
        seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = DataLoader(data(SIZE), batch_size=16)
        model, optimizer, loader = prepare(model, optimizer, batches, num_shards=2, checkpoint_every=2)
        for _ in loader.epochs(2):
            for inputs, targets in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
        complete_left(session)

    alone(run)
    assert session.reports(Completed)
    assert {saved.iteration for saved in session.reports(CheckpointSaved)} <= {2, 4, 6}
    assert session.reports(CheckpointSaved)[-1].iteration == 2 * ITERATIONS


@pytest.mark.parametrize("validates", [False, True])
def test_the_end_of_each_epoch_is_reported_once_with_its_scores(tmp_path: Path, validates: bool) -> None:
    session = Stored(tmp_path)
    train(session, epochs=2, validation=data(20) if validates else None)
    ends = [message for message in session.reports(Progress) if message.ends_epoch]
    assert [(message.epoch, message.iteration) for message in ends] == [(0, ITERATIONS), (1, 2 * ITERATIONS)]
    assert [set(message.validation) for message in ends] == [{"loss"} if validates else set()] * 2
