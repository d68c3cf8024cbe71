"""What a script does at the start and at the end of an epoch counts once, whoever joins, resumes or recovers there."""

import subprocess
import sys
from collections.abc import Iterator
from contextvars import Context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from resile.training import ElasticLoop, State
from resile_learner.collectives.exchange import ExchangeRound
from resile_learner.collectives.spec import RoundSpec
from resile_learner.messages import Ready
from resile_learner.session import SoloSession, enter_session
from resile_learner.state.flat import unflatten
from resile_learner.state.run import RunState
from resile_learner.training.received import MOST_BYTES

from .recorded_sessions import FlatCopy, Joining, Losing, Recorded
from .shard_bodies import prepare

EPOCHS = 3
PER_EPOCH = 2
ROUNDS = range(1, EPOCHS * PER_EPOCH + 1)
"""Those of the iterations: round 0 compares facts."""


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.temperature = 1.0
        self.register_buffer("scale", torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs) * self.temperature * self.scale
        return outputs


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Without a length."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self._dataset[index] for index in range(len(self._dataset)))


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 4, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def start_epoch(model: Scaled, optimizer: torch.optim.Optimizer, schedule: Any, progress: State) -> None:
    """Changes everything by what it was before."""
    model.temperature *= 0.9
    model.scale.mul_(1.25)
    for group in optimizer.param_groups:
        group["weight_decay"] += 0.1
    schedule.step()
    progress.begun += 1
    progress.drawn = torch.rand(()).item()
    progress.names.append(f"epoch {progress.begun}")


def made() -> tuple[Scaled, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, State]:
    torch.manual_seed(0)
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7), State(begun=0, names=[], drawn=0.0)


def trained(session: SoloSession, dataset: Any) -> tuple[str, dict[str, Any]]:
    """Train by a prepared loop; the sha256 of the parameters and what became of the rest."""

    def run() -> tuple[str, dict[str, Any]]:
        enter_session(session)
        model, optimizer, schedule, progress = made()
        loader: Any = DataLoader(dataset, batch_size=16)
        state = {"progress": progress}
        _, _, loader, _ = prepare(model, optimizer, loader, schedule, state=state, num_shards=2)
        for _ in loader.epochs(EPOCHS):
            start_epoch(model, optimizer, schedule, progress)
            for inputs, targets in loader:
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            progress.scale = model.scale.item()
        return loader.result.params_sha256, {
            "temperature": model.temperature,
            "rate": optimizer.param_groups[0]["lr"],
            **vars(progress),
        }

    return Context().run(run)


def plain() -> dict[str, Any]:
    """The same script before it was prepared: what becomes of its parameters and the rest."""
    model, optimizer, schedule, progress = made()
    for _ in range(EPOCHS):
        start_epoch(model, optimizer, schedule, progress)
        for inputs, targets in DataLoader(samples(), batch_size=16):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return {"temperature": model.temperature, "rate": optimizer.param_groups[0]["lr"], **vars(progress)}


DATASETS = pytest.mark.parametrize("dataset", [samples(), Stream(samples())], ids=["map", "stream"])


@DATASETS
def test_code_at_the_start_of_an_epoch_acts_as_in_the_plain_script(dataset: Any) -> None:
    _, end = trained(SoloSession(), dataset)
    expected = plain()
    assert end.pop("scale") == 1.25**EPOCHS
    assert (end.pop("drawn"), expected.pop("drawn")) != (0.0, 0.0)
    assert end == expected


@DATASETS
@pytest.mark.parametrize("first_round", ROUNDS)
def test_a_worker_that_joins_or_resumes_repeats_it_without_effect(dataset: Any, first_round: int) -> None:
    ahead = Recorded()
    undisturbed = trained(ahead, dataset)
    assert trained(Joining(ahead.at_boundary[first_round]), dataset) == undisturbed
    assert trained(Joining(ahead.in_round[first_round]), dataset) == undisturbed, "its donor was lost, another recovers"


@DATASETS
@pytest.mark.parametrize("lost_round", ROUNDS)
def test_a_worker_that_recovers_repeats_it_without_effect(dataset: Any, lost_round: int) -> None:
    ahead = Recorded()
    undisturbed = trained(ahead, dataset)
    assert trained(Losing(lost_round, None), dataset) == undisturbed
    for states in (ahead.at_boundary, ahead.in_round):
        assert trained(Losing(lost_round, states[lost_round + 1]), dataset) == undisturbed


def test_a_worker_gives_what_it_received_to_the_next_before_it_has_begun_itself() -> None:
    """Its own donor is lost as it opens the iteration, in which the donor had run the code of the epoch."""
    ahead = Recorded()
    undisturbed = trained(ahead, samples())
    for first_round in ROUNDS:
        between = RecordedJoiner(ahead.in_round[first_round])
        trained(between, samples())
        assert trained(Joining(between.opened), samples()) == undisturbed


class RecordedJoiner(Joining):
    """Keeps a copy of its state at the boundary of its first round."""

    opened: FlatCopy

    def join(self, ready: Ready, state: RunState) -> bool:
        self._state: RunState | None = state
        return super().join(ready, state)

    def begin(self, spec: RoundSpec) -> ExchangeRound:
        if self._state is not None:
            flat, self._state = self._state.flatten(), None
            self.opened = flat.skeleton, [tensor.clone() for tensor in flat.tensors]
        return super().begin(spec)


@pytest.mark.parametrize("lost_round", ROUNDS)
@pytest.mark.parametrize("undoes", [False, True])
def test_a_loop_by_hand_repeats_the_code_before_an_iteration_without_effect(lost_round: int, undoes: bool) -> None:
    def by_hand(session: SoloSession, undoes: bool) -> str:
        enter_session(session)
        model, optimizer, _, progress = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loop = ElasticLoop(
            model, optimizer, samples(), epochs=EPOCHS, batch_size=16, num_shards=2, state={"progress": progress}
        )
        for iteration in loop:
            model.temperature *= 0.9
            progress.begun += 1
            for inputs, targets in iteration.shards():
                iteration.backward(F.cross_entropy(model(inputs), targets))
            if iteration.exchange():
                optimizer.step()
            elif undoes:
                model.temperature /= 0.9
                progress.begun -= 1
        assert loop.result is not None
        return f"{progress.begun} {loop.result.params_sha256}"

    def alone(session: SoloSession) -> str:
        return Context().run(by_hand, session, undoes)

    ahead = Recorded()
    undisturbed = alone(ahead)
    assert undisturbed.startswith(f"{EPOCHS * PER_EPOCH} ")
    assert alone(Losing(lost_round, None)) == undisturbed
    assert alone(Joining(ahead.at_boundary[lost_round])) == undisturbed
    assert alone(Joining(ahead.in_round[lost_round])) == undisturbed


def end_epoch(model: Scaled, optimizer: torch.optim.Optimizer, schedule: Any, progress: State) -> None:
    """Changes everything by what it was before."""
    model.temperature *= 0.9
    model.epochs = getattr(model, "epochs", 0) + 1
    model.scale.mul_(1.25)
    optimizer.param_groups[0]["weight_decay"] += 0.1
    schedule.step()
    progress.bad += 1
    progress.drawn += torch.rand(()).item()
    progress.names.append(f"epoch {progress.bad}")


def stopped(session: SoloSession, dataset: Any, *, patience: int, repeats: bool) -> tuple[Any, ...]:
    """Train until the epoch in which a counter comes to ``patience``; what the script found at the end of each epoch.

    ``repeats``: it does at the start of an epoch what it does at its end.
    """

    def run() -> tuple[Any, ...]:
        enter_session(session)
        model, optimizer, schedule, _ = made()
        progress, average = State(bad=0, names=[], drawn=0.0), AveragedModel(model)
        state = {"progress": progress, "average": average}
        loader: Any = DataLoader(dataset, batch_size=16)
        _, _, loader, _ = prepare(model, optimizer, loader, schedule, state=state, num_shards=2)
        found: dict[int, Any] = {}
        for epoch in loader.epochs(EPOCHS):
            if repeats:
                end_epoch(model, optimizer, schedule, progress)
            for inputs, targets in loader:
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            end_epoch(model, optimizer, schedule, progress)
            average.update_parameters(model)
            attributes = (model.temperature, model.epochs, model.scale.item(), average.n_averaged.item())
            found[epoch] = (loader.epoch, loader.iteration, loader.loss, loader.sync_gradients, *attributes)
            found[epoch] += (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"])
            found[epoch] += (progress.bad, progress.drawn, list(progress.names))
            if progress.bad >= patience:
                break
        sha = loader.result.params_sha256
        return sha, loader.result.iterations, loader.iteration, loader.epoch, found, vars(progress), model.temperature

    return Context().run(run)


@DATASETS
@pytest.mark.parametrize("lost_round", ROUNDS)
@pytest.mark.parametrize(("patience", "repeats"), [(1, False), (2, False), (3, False), (9, True), (4, True)])
def test_a_worker_that_was_behind_ends_an_epoch_by_what_the_others_found_there(
    dataset: Any, lost_round: int, patience: int, repeats: bool
) -> None:
    """It decides alike, so all leave the loop together; and what it did counts once."""
    ahead = Recorded()
    undisturbed = stopped(ahead, dataset, patience=patience, repeats=repeats)
    for states in (ahead.at_boundary, ahead.in_round):
        if lost_round + 1 in states:
            received = states[lost_round + 1]
            assert stopped(Losing(lost_round, received), dataset, patience=patience, repeats=repeats) == undisturbed


def test_a_state_has_what_an_epoch_ended_with_only_until_the_next_iteration() -> None:
    ahead = Recorded()
    stopped(ahead, samples(), patience=9, repeats=False)
    received = [unflatten(*ahead.at_boundary[round_])["may_differ"]["received"] for round_ in ROUNDS]
    assert [bool(each["before_end"]) for each in received] == [False, False, True, False, True, False]


def test_a_part_that_is_large_or_cannot_be_stored_is_not_kept_twice() -> None:
    def run() -> list[str]:
        enter_session(SoloSession())
        model = Scaled()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        state = {"large": State(text="a" * MOST_BYTES), "small": State(best=1), "odd": State(value=object())}
        _, _, loader = prepare(model, optimizer, DataLoader(samples(), batch_size=16), state=state)
        for _ in loader.epochs(1):
            for inputs, targets in loader:
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
        return list(loader._run.received.state_dict()["before_end"]["parts"])

    assert Context().run(run) == ["buffers", "options of optimizer 0", "state small"]


@pytest.mark.parametrize("ending", ["leaves", "stops"])
@pytest.mark.parametrize("num_epochs", [1, 2, 3])
def test_a_worker_that_was_behind_at_the_last_epoch_has_what_the_others_have(
    ending: str, num_epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its average of weights is found as it was after the code, which updates it again."""
    monkeypatch.setattr("resile_learner.training.received.MOST_BYTES", 0)

    def train(session: SoloSession) -> tuple[Any, ...]:
        enter_session(session)
        model, optimizer, schedule, _ = made()
        average = AveragedModel(model)
        loader: Any = DataLoader(samples(), batch_size=16)
        _, _, loader, _ = prepare(model, optimizer, loader, schedule, state={"average": average}, num_shards=2)
        for epoch in loader.epochs(EPOCHS):
            for inputs, targets in loader:
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            average.update_parameters(model)
            schedule.step()
            if epoch + 1 == num_epochs and ending == "stops":
                loader.stop()
            elif epoch + 1 == num_epochs:
                break
        counts = average.n_averaged.item(), schedule.last_epoch, optimizer.param_groups[0]["lr"]
        return counts, loader.result.params_sha256, loader.iteration, loader.iterations_total

    def alone(session: SoloSession) -> tuple[Any, ...]:
        return Context().run(train, session)

    ahead = Recorded()
    undisturbed = alone(ahead)
    last = num_epochs * PER_EPOCH
    assert alone(Losing(last, ahead.at_boundary[last + 1])) == undisturbed


class Caching(Scaled):
    """Keeps the size of its largest batch, longer than those that some workers train with."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 10

    def forward(self, inputs: Tensor) -> Tensor:
        self.largest = max(self.largest, len(inputs))
        return super().forward(inputs)


def test_what_a_forward_pass_keeps_stays_where_a_worker_was_behind_at_the_end_of_an_epoch() -> None:
    """Another worker has seen it change while shards were computed, this one in the script's validation alone."""

    def train(session: SoloSession, largest: int) -> str:
        enter_session(session)
        torch.manual_seed(0)
        model = Caching()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loader: Any
        _, _, loader = prepare(model, optimizer, DataLoader(samples(), batch_size=16), num_shards=2)
        for _ in loader.epochs(EPOCHS):
            for inputs, targets in loader:
                model.largest = max(model.largest, largest)
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            with torch.no_grad():
                model(torch.ones(24, 4))
            model.temperature *= 0.9
        sha: str = loader.result.params_sha256
        return sha

    def alone(session: SoloSession, largest: int) -> str:
        return Context().run(train, session, largest)

    ahead = Recorded()
    undisturbed = alone(ahead, 20)
    last = 2 * PER_EPOCH
    assert alone(Losing(last, ahead.at_boundary[last + 1]), 10) == undisturbed


class Sharing(nn.Module):
    """Two layers with one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scaled(), Scaled()
        self.second._buffers["scale"] = self.first.scale

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.first(inputs) + self.second(inputs)
        return outputs


@pytest.mark.parametrize("lost_round", ROUNDS)
def test_layers_that_share_a_buffer_still_share_it(lost_round: int) -> None:
    def train(session: SoloSession) -> tuple[str, float, float]:
        enter_session(session)
        torch.manual_seed(0)
        model = Sharing()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loader: Any
        _, _, loader = prepare(model, optimizer, DataLoader(samples(), batch_size=16), num_shards=2)
        for _ in loader.epochs(EPOCHS):
            model.first.scale.mul_(1.25)
            for inputs, targets in loader:
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            model.first.scale.mul_(0.9)
        return loader.result.params_sha256, model.first.scale.item(), model.second.scale.item()

    def alone(session: SoloSession) -> tuple[str, float, float]:
        return Context().run(train, session)

    ahead = Recorded()
    undisturbed = alone(ahead)
    for states in (ahead.at_boundary, ahead.in_round):
        assert alone(Joining(states[lost_round])) == undisturbed
        if lost_round + 1 in states:
            assert alone(Losing(lost_round, states[lost_round + 1])) == undisturbed


class Appended:
    """Takes over a state in addition to its own."""

    def __init__(self) -> None:
        self.values = [0]

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = self.values + state_dict["values"]


def test_a_part_that_the_script_has_not_changed_is_loaded_once_and_may_have_a_gradient_history() -> None:
    def train(session: SoloSession) -> int:
        enter_session(session)
        torch.manual_seed(0)
        model = Scaled()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        appended, progress = Appended(), State(norm=None)
        state = {"appended": appended, "progress": progress}
        loader: Any
        _, _, loader = prepare(model, optimizer, DataLoader(samples(), batch_size=16), state=state, num_shards=2)
        for _ in loader.epochs(EPOCHS):
            for inputs, targets in loader:
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                if loader.sync_gradients:
                    progress.norm = model.layer.weight.square().sum()
        return len(appended.values)

    def alone(session: SoloSession) -> int:
        return Context().run(train, session)

    ahead = Recorded()
    assert alone(ahead) == 1
    assert alone(Joining(ahead.at_boundary[PER_EPOCH])) == 1 + 1


STREAM_LEFT = """
import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset
from resile.training import prepare

class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(32, 4))

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
_, optimizer, loader = prepare(model, optimizer, DataLoader(Stream(), batch_size=16), body="shard")
for _ in loader.epochs(2):
    for inputs in loader:
        model(inputs).mean().backward()
        optimizer.step()
    {ending}
"""


@pytest.mark.parametrize(
    ("ending", "says"),
    [
        ("break\nmodel.load_state_dict(model.state_dict())", "completed: params_sha256"),
        ("nn.utils", "NameError"),
    ],
)
def test_a_loop_over_a_stream_is_left_as_any_other(ending: str, says: str, tmp_path: Path) -> None:
    """Its loader has no length, which python asks for where it asks whether there is a loader."""
    script = tmp_path / "train.py"
    script.write_text(STREAM_LEFT.format(ending=ending))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert says in done.stderr
    assert "no length" not in done.stderr
