"""Loops whose body runs once for each batch: they compute what the plain loop computes."""

import copy
import dataclasses
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from contextvars import Context
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

from resile.training import buffers, prepare, undivided
from resile_learner.collectives.exchange import ExchangeRound
from resile_learner.collectives.spec import Abandoned, RoundSpec
from resile_learner.session import SoloSession, StateLost, enter_session
from resile_learner.state.run import NoState, RunState, TrainingProgress
from resile_learner.training import buffers as training_buffers
from resile_learner.training.division import call, gathering, passes
from resile_learner.training.replay import RepeatedRounds, RoundOutcome
from resile_shared.errors import UsageError

from .recorded_sessions import AtBoundaries, FlatCopy, Joining

EPOCHS = 3
SAMPLES = 96
BATCH = 32
SHARDS = 8


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """A run that an error has ended restores settings of PyTorch when it is collected: not within the next test."""
    yield
    gc.collect()


class Trained(NamedTuple):
    parameters: list[Tensor]
    printed: list[float]


Body = Callable[[Any, Any, Any, Any, list[float]], None]


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 8, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0.8).long())


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 10))


def train(
    body: Body,
    make: Callable[[], nn.Module] = perceptron,
    *,
    shards: int | None,
    samples: int = SAMPLES,
    session: SoloSession | None = None,
    **options: Any,
) -> Trained:
    """Train a model; ``shards`` is None for the plain loop."""

    def run() -> Trained:
        enter_session(session or SoloSession())
        torch.manual_seed(0)
        model: Any = make()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = torch.utils.data.Subset(dataset(), range(samples))
        loader: Any = DataLoader(data, batch_size=BATCH)
        printed: list[float] = []
        epochs: Any = range(EPOCHS)
        if shards is not None:
            model, optimizer, loader = prepare(model, optimizer, loader, body="batch", num_shards=shards, **options)
            epochs = loader.epochs(EPOCHS)
        for epoch in epochs:
            for number, (inputs, targets) in enumerate(loader):
                body(model, optimizer, (epoch * len(loader) + number, EPOCHS * len(loader)), (inputs, targets), printed)
        return Trained([parameter.detach().clone() for parameter in model.parameters()], printed)

    return Context().run(run)


def check_like_plain(
    body: Body, make: Callable[[], nn.Module] = perceptron, *, tolerance: float = 1e-5, **more: Any
) -> None:
    expected, found = train(body, make, shards=None, **more), train(body, make, shards=SHARDS, **more)
    assert found.printed == pytest.approx(expected.printed, rel=tolerance, nan_ok=True)
    assert len(found.printed) == len(expected.printed)
    for one, other in zip(found.parameters, expected.parameters, strict=True):
        torch.testing.assert_close(one, other, rtol=10 * tolerance, atol=tolerance, equal_nan=True)
    again = train(body, make, shards=SHARDS, **more)
    assert all(map(torch.equal, found.parameters, again.parameters))


def everything(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
    """Rates by the number of the batch, class weights, negatives, a summed term, accumulation, clipping."""
    number, total = place
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * (1 - number / total)
    outputs = model(batch[0])
    logits, embedded = outputs[:, :2], F.normalize(outputs[:, 2:], dim=1)
    similar = embedded @ embedded.T / 0.1
    loss = F.cross_entropy(logits, batch[1], weight=torch.tensor([1.0, 9.0]))
    loss = loss + 0.1 * F.cross_entropy(similar, torch.arange(len(logits))) + 1e-3 * (logits**2).sum()
    (loss / 2).backward()
    if number % 2:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    printed += [loss.item(), (logits.argmax(1) == batch[1]).float().mean().item()]


def usual(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    printed.append(loss.item())


def test_what_a_body_does_with_a_whole_batch_means_what_it_means_in_plain_pytorch() -> None:
    check_like_plain(everything)


def trained_until(leave: str, *, shards: int | None) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """Train a model in a loop that ends an epoch, or the training, early: by what it has seen, as early stopping."""

    def run() -> tuple[list[Tensor], list[tuple[int, int]]]:
        enter_session(SoloSession())
        torch.manual_seed(0)
        model: Any = perceptron()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-2)
        loader: Any = DataLoader(dataset(), batch_size=BATCH // 2)
        if shards is not None:
            model, optimizer, loader = prepare(model, optimizer, loader, body="batch", num_shards=shards)
        trained = []
        for epoch in range(EPOCHS) if shards is None else loader.epochs(EPOCHS):
            if (epoch, leave) == (1, "before a batch"):
                break
            for number, batch in enumerate(loader):
                usual(model, optimizer, None, batch, [])
                trained.append((epoch, number))
                if number == 2 and leave in ("an epoch", "both"):
                    break
            if epoch == 1 and leave in ("training", "both"):
                break
        best = [parameter.detach().clone() for parameter in model.parameters()]
        model.load_state_dict(copy.deepcopy(model.state_dict()))  # as a script does with the best one, which completes
        assert shards is None or loader.result.iterations == len(trained)
        return best, trained

    return Context().run(run)


@pytest.mark.parametrize("leave", ["an epoch", "training", "both", "before a batch"])
def test_a_loop_that_is_left_early_trains_as_the_plain_one_does(leave: str) -> None:
    (expected, plain), (found, divided) = trained_until(leave, shards=None), trained_until(leave, shards=SHARDS)
    assert divided == plain
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


class TimeFirst(nn.Module):
    """Its rows are steps of time."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, 4)

    def forward(self, inputs: Tensor) -> Any:
        return self.recurrent(inputs.unsqueeze(1))[0]


class Centered(nn.Module):
    """It subtracts the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Any:
        outputs = self.layer(inputs)
        return outputs - outputs.mean(0)


class Contrasting(Centered):
    """Its loss compares each row with all others."""

    def forward(self, inputs: Tensor) -> Any:
        outputs = F.normalize(self.layer(inputs), dim=1)
        return F.cross_entropy(outputs @ outputs.T / 0.1, torch.arange(len(inputs)))


class Mining(Centered):
    """Its loss is the same for halves of rows of one kind: 0."""

    def forward(self, inputs: Tensor) -> Any:
        outputs = self.layer(inputs)
        same = torch.ones(len(inputs), len(inputs), dtype=torch.bool)
        return F.relu(1.0 - torch.cdist(outputs, outputs).masked_fill(same, 1e6).amin(1)).mean()


class Keeping(Centered):
    """It keeps what it has computed."""

    def forward(self, inputs: Tensor) -> Any:
        self.features = self.layer(inputs)
        return self.features


class Warming(Centered):
    """It counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, inputs: Tensor) -> Any:
        if self.training:
            self.steps += 1
        return self.layer(inputs) * min(1.0, self.steps / 10)


class Counting(Centered):
    """It counts what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Any:
        if self.training:
            self.seen += len(inputs)
            self.largest.copy_(torch.maximum(self.largest, inputs.max()))
        return self.layer(inputs)


class Declared(Counting):
    def __init__(self) -> None:
        super().__init__()
        buffers(self, seen="sum", largest="max")


class Balanced(Declared):
    """It computes with the counts that include those of its rows."""

    def forward(self, inputs: Tensor) -> Any:
        outputs = super().forward(inputs)
        return outputs / self.seen


class Usual(nn.Module):
    """It mixes rows as all models may: batch statistics, random numbers, a loss, a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        nn.utils.parametrizations.spectral_norm(self.layers[0])  # its buffers follow the weights
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Any:
        logits = self.layers(inputs)
        self.calls += 1
        targets = torch.where(inputs[:, 0] > 0, 1, -100)
        penalty = 1e-3 * sum(each.square().sum() for each in self.parameters())
        return logits, F.cross_entropy(logits, targets) + penalty, logits.square().sum(), logits.argmax(1)


class Noisy(nn.Module):
    """It draws random numbers when it is evaluated, too, so that nothing can be said of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Any:
        return F.dropout(self.layer(inputs), 0.5)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (TimeFirst, "what the model computes for a sample depends on the other samples"),
        (Centered, "what the model computes for a sample depends on the other samples"),
        (Contrasting, "a single value that the model returns for a batch"),
        (Mining, "it is not certain how a single value that the model returns for a batch"),
        (
            Counting,
            'the model changes its buffer seen, largest by the rows.*buffers(model, seen="sum", largest="max")`',
        ),
        (Declared, ""),
        (Balanced, "depends on its buffer seen, largest after the call has changed it"),
        (Keeping, "the model changes its attribute features when it is called"),
        (Warming, "the model changes its attribute steps when it is called"),
        (Usual, "BatchNorm normalizes each shard by the statistics of its own samples.* at once and in two parts"),
        (Noisy, ""),
    ],
)
def test_a_model_whose_rows_depend_on_each_other_is_named_before_it_trains(
    make: Callable[[], nn.Module], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        outputs = model(batch[0])
        assert model.training
        (outputs[0] if isinstance(outputs, tuple) else outputs).mean().backward()
        optimizer.step()

    train(body, make, shards=SHARDS)
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == bool(says)
    assert all(part in "".join(warnings) for part in says.split(".*"))


class StepsOfTime(nn.Module):
    """Its inputs have the batch in their second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(1, 4), nn.Linear(4, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.recurrent(inputs)[1][0][0])
        return outputs


class Padding(nn.Module):
    """It cuts its outputs at the longest text of the batch, as pad_packed_sequence does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        longest = int((inputs > 0).sum(1).max())
        outputs: Tensor = self.layer(inputs[:, :longest, None])
        return outputs


class Pooling(nn.Module):
    """Its rows are nodes, and its outputs belong to graphs; a loss of its own has the shape [1]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 10)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.layer(inputs).view(-1, 2, 10).mean(1)
        return outputs, outputs.square().mean().reshape(1)


def steps_of_time(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
    usual(lambda inputs: model(inputs.T[..., None]), optimizer, place, batch, printed)


def padded(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
    usual(lambda inputs: model(inputs).sum(1), optimizer, place, batch, printed)


def pooled(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
    optimizer.zero_grad()
    outputs, penalty = model(batch[0])
    loss = F.cross_entropy(outputs, batch[1][::2]) + penalty.sum()
    loss.backward()
    optimizer.step()
    printed.append(loss.item())


@pytest.mark.parametrize(
    ("make", "body", "says"),
    [
        (StepsOfTime, steps_of_time, "has the shape (32, 10) for"),
        (Padding, padded, "an output of the model has the shape"),
        (Pooling, pooled, "has the shape (2, 10) for 4 rows"),
    ],
)
def test_a_model_that_does_not_return_rows_is_computed_in_full(
    make: Callable[[], nn.Module], body: Body, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_like_plain(body, make)
    assert says in capsys.readouterr().err


class Codebook(nn.Module):
    """It takes a table beside the samples, which has as many rows as the last batch of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 10)

    def forward(self, inputs: Tensor, table: Tensor, *, mode: str = "") -> Tensor:
        outputs: Tensor = self.layer(inputs) @ table.T @ table
        return outputs - outputs.mean(0) if mode == "centered" else outputs


def test_a_table_is_not_cut_where_a_batch_has_as_many_rows() -> None:
    table = torch.randn(6, 10, generator=torch.Generator().manual_seed(3))

    def body(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        usual(lambda inputs: model(inputs, table), optimizer, place, batch, printed)

    check_like_plain(body, Codebook, samples=BATCH * 2 + 6)


@pytest.mark.parametrize("way", ["argument", "attribute"])
def test_a_model_that_is_called_in_another_way_is_checked_again(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Switched(Codebook):
        mode = ""

        def forward(self, inputs: Tensor, table: Tensor, *, mode: str = "") -> Tensor:
            return super().forward(inputs, table, mode=mode or self.mode)

    def body(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        mode = "centered" if place[0] >= 4 else ""
        if way == "attribute":
            model.mode = mode
        more = {"mode": mode} if way == "argument" else {}
        usual(lambda inputs: model(inputs, torch.eye(10), **more), optimizer, place, batch, printed)

    check_like_plain(body, Switched)
    assert "depends on the other samples" in capsys.readouterr().err


def test_a_model_that_contains_another_one_of_the_run_computes_its_shards_by_itself() -> None:
    """Both are called in the body, and share parameters."""

    def body(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        whole, encoder = model
        optimizer.zero_grad()
        loss = F.cross_entropy(whole(batch[0]), batch[1]) + encoder(batch[0]).square().mean()
        loss.backward()
        optimizer.step()
        printed.append(loss.item())

    def both() -> nn.ModuleList:
        whole = perceptron()
        assert isinstance(whole, nn.Sequential)
        return nn.ModuleList([whole, whole[0]])

    check_like_plain(body, both)


class Auxiliary(nn.Module):
    """It keeps a value for the loss, in ``place``, and a table that it makes once."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 10)
        self.losses: dict[str, Tensor] = {}
        self._auxiliary: Any = None
        self._table: Any = None
        self._place = place

    def forward(self, inputs: Tensor) -> Tensor:
        if self._table is None:
            self._table = torch.linspace(0, 1, 10)
        outputs: Tensor = self.layer(inputs) + self._table
        if self._place == "dict":
            self.losses["auxiliary"] = outputs.square().mean()
        elif self._place == "private":
            self._auxiliary = outputs.square().mean()
        return outputs


@pytest.mark.parametrize("place", ["dict", "private", "nowhere"])
def test_what_a_model_keeps_for_the_body_is_of_the_whole_batch(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    def body(model: Any, optimizer: Any, _: Any, batch: Any, printed: list[float]) -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        kept = model.losses["auxiliary"] if place == "dict" else model._auxiliary
        (loss if kept is None else loss + kept).backward()
        optimizer.step()
        printed.append(loss.item())

    check_like_plain(body, lambda: Auxiliary(place))
    assert ("the model changes its attribute" in capsys.readouterr().err) == (place != "nowhere")


def test_rows_that_depend_on_each_other_only_in_later_batches_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    """The first samples are alike, as to what mixes them; and a batch of one sample says nothing."""

    class Centering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 10)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.layer(inputs)
            return outputs - (inputs[:, :1] > 9).float().mean()

    def body(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        inputs = batch[0].clone()
        if place[0] >= 1:
            inputs[1::4, 0] += 20
        usual(model, optimizer, place, (inputs[:1], batch[1][:1]) if place[0] == 0 else (inputs, batch[1]), printed)

    train(body, Centering, shards=SHARDS)
    assert "depends on the other samples" in capsys.readouterr().err


def test_a_dataset_that_grows_is_named() -> None:
    samples = [(torch.randn(8), 0) for _ in range(40)]

    def run() -> None:
        enter_session(SoloSession())
        model: Any = perceptron()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-2)
        data: Any = DataLoader(samples, batch_size=8)  # type: ignore[arg-type]
        model, optimizer, loader = prepare(model, optimizer, data, num_shards=4)
        for _ in loader.epochs(2):
            for batch in loader:
                usual(model, optimizer, None, batch, [])
            samples.append(samples[0])

    with pytest.raises(UsageError, match="has 41 samples now, and had 40"):
        Context().run(run)


def test_features_as_many_as_samples_are_no_second_batch() -> None:
    def body(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        twice = torch.cat([batch[0], batch[0] + 0.1]).repeat(1, BATCH // 8)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(twice), batch[1].repeat(2))
        loss.backward()
        optimizer.step()
        printed.append(loss.item())

    check_like_plain(body, lambda: nn.Linear(BATCH, 10))


@pytest.mark.parametrize("when", ["before", "after", "in place"])
def test_a_compiled_model_is_compiled_within_its_shards(when: str) -> None:
    compiled: list[Any] = []
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def compile_once(model: Any) -> Any:
        if not compiled:
            if when == "in place":
                model.compile(backend=backend)
                compiled.append(model)
            else:
                compiled.append(torch.compile(model, backend=backend))
        return compiled[0]

    def body(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        usual(model if when == "before" else compile_once(model), optimizer, place, batch, printed)

    def make() -> nn.Module:
        compiled.clear()
        torch._dynamo.reset()
        model: nn.Module = perceptron()
        return compile_once(model) if when == "before" else model

    check_like_plain(body, make)
    graphs.clear()
    train(body, make, shards=SHARDS)
    assert graphs


def evaluated(loader: Any, most: int | None = None) -> list[float]:
    return [batch[0].sum().item() for number, batch in enumerate(loader) if most is None or number < most]


def test_the_loader_may_be_read_to_evaluate_within_its_own_loop_and_after_it() -> None:
    def run(*, shards: int | None) -> list[Any]:
        enter_session(SoloSession())
        torch.manual_seed(0)
        model: Any = perceptron()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-2)
        loader: Any = DataLoader(dataset(), batch_size=BATCH)
        if shards is not None:
            model, optimizer, loader = prepare(model, optimizer, loader, body="batch", num_shards=shards)
        seen: list[Any] = []
        for epoch in range(2) if shards is None else loader.epochs(2):
            for number, batch in enumerate(loader):
                usual(model, optimizer, None, batch, [])
                seen.append((epoch, number, batch[0].sum().item(), evaluated(loader, most=1), evaluated(loader)))
            seen.append(evaluated(loader))
        assert len(evaluated(loader)) == len(loader)
        return seen

    assert Context().run(run, shards=SHARDS) == Context().run(run, shards=None)


def test_a_model_can_be_stored_as_a_whole_while_it_trains(tmp_path: Path) -> None:
    stored: list[nn.Module] = []

    def body(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        usual(model, optimizer, place, batch, printed)
        torch.save(model, tmp_path / "model.pt")
        stored.append(torch.load(tmp_path / "model.pt", weights_only=False))
        with torch.no_grad():
            assert torch.equal(stored[-1](batch[0]), model(batch[0]))

    train(body, shards=SHARDS)
    assert stored[-1](torch.zeros(3, 8)).requires_grad


def test_a_body_may_draw_its_batches_itself() -> None:
    def run() -> int:
        enter_session(SoloSession())
        model = perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        counting: Any = DataLoader(range(3))
        _, _, counting = prepare(model, optimizer, counting, body="batch", num_shards=4)
        sizes = set()
        for _ in counting.epochs(1):
            for _ in counting:
                outputs = model(torch.randn(32, 8))
                outputs.square().mean().backward()
                optimizer.step()
                sizes.add(len(outputs))
        assert sizes == {32}
        return int(counting.result.iterations)

    assert Context().run(run) == 3


class Tracker:
    """An object of a script."""

    def __init__(self) -> None:
        self.best = 1e9
        self.history: list[float] = []


def counting(session: SoloSession) -> tuple[list[Any], str]:
    """Train a loop that counts, and whose epochs begin with a step of its schedule; return what it printed."""
    enter_session(session)
    torch.manual_seed(0)
    model: Any = perceptron()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-2)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader: Any = DataLoader(dataset(), batch_size=BATCH)
    model, optimizer, loader, schedule = prepare(model, optimizer, loader, schedule, body="batch", num_shards=4)
    printed: list[Any] = []
    tracker, average, begun = Tracker(), copy.deepcopy(model), 0
    factors = [1.0, 0.5, 0.25]

    def train_epoch() -> None:
        total = 0.0
        for number, ((inputs, targets), factor) in enumerate(zip(loader, factors, strict=False), 1):
            optimizer.zero_grad()
            loss = factor * F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item()
            tracker.best = min(tracker.best, loss.item())
            tracker.history.append(loss.item())
            with torch.no_grad():
                average[0].weight.lerp_(model[0].weight, 0.1)
            rate = optimizer.param_groups[0]["lr"]
            seen = (begun, number, total, tracker.best, len(tracker.history), average[0].weight.sum().item(), rate)
            printed.append((loader.iteration, *seen))

    for _ in loader.epochs(EPOCHS):
        begun += 1
        schedule.step()
        train_epoch()
    return printed, loader.result.params_sha256


def test_a_worker_that_joins_at_any_iteration_goes_on_as_the_others_do() -> None:
    ahead = AtBoundaries()
    printed, sha = Context().run(counting, ahead)
    assert [line[0] for line in printed] == list(range(EPOCHS * SAMPLES // BATCH))
    for iteration in range(1, len(printed)):
        joined, other_sha = Context().run(counting, Joining(ahead.before[iteration]))
        assert joined[-(len(printed) - iteration) :] == printed[iteration:]
        assert other_sha == sha


FAILING = """
import sys
import torch
from torch.utils.data import DataLoader
from resile.training import ElasticLoop, prepare

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.ones(32, 4)

def by_hand():
    iterations = iter(ElasticLoop(model, optimizer, inputs, epochs=3, batch_size=8))
    for iteration in iterations:
        shards = iteration.shards()
        for shard in shards:
            iteration.backward(model(shard).mean())
            if iteration.number == 2:
                raise ValueError("the user's")
        if iteration.exchange():
            optimizer.step()

if sys.argv[1] == "by hand":
    by_hand()
model, optimizer, loader = prepare(model, optimizer, DataLoader(inputs, batch_size=8), body=sys.argv[1])
epochs = loader.epochs(3, start=1)
for epoch in epochs:
    for inputs in loader:
        model(inputs).mean().backward()
        optimizer.step()
        if epoch == 2:
            raise ValueError("the user's")
"""


def test_buffers_that_count_rows_count_those_of_the_batch() -> None:
    def body(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        optimizer.zero_grad()
        model(batch[0]).square().mean().backward()
        optimizer.step()
        printed += [model.seen.item(), model.largest.item()]

    for make in (Counting, Declared, Balanced):
        check_like_plain(body, make)


def test_calls_that_a_model_counts_are_those_of_batches() -> None:
    def body(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        optimizer.zero_grad()
        value = model(batch[0]).square().mean()
        value.backward()
        optimizer.step()
        printed += [model.steps, value.item()]

    check_like_plain(body, Warming)


def test_a_wrapper_of_an_optimizer_is_named() -> None:
    model = perceptron()
    wrapper: Any = type("Warmup", (), {"param_groups": []})()
    with pytest.raises(UsageError, match="was given a Warmup as optimizer"):
        Context().run(prepare, model, wrapper, DataLoader(dataset(), batch_size=BATCH), body="batch")


@pytest.mark.parametrize("body", ["batch", "shard", "by hand"])
def test_an_error_in_a_loop_that_something_refers_to_ends_the_script_as_any_other(body: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILING)
    done = subprocess.run([sys.executable, script, body], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: the user's"
    assert "ignored" not in done.stderr


def test_a_scaled_loss_is_reported_as_it_is() -> None:
    def run() -> tuple[float, float]:
        enter_session(SoloSession())
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        model = perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        loader: Any = DataLoader(dataset(), batch_size=BATCH)
        _, _, loader = prepare(model, optimizer, loader, body="batch", grad_scaler=scaler)
        value = 0.0
        for _ in loader.epochs(1):
            for inputs, targets in loader:
                loss = F.cross_entropy(model(inputs), targets)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                value = loss.item()
        return value, loader.loss

    value, reported = Context().run(run)
    assert reported == pytest.approx(value)


@pytest.mark.parametrize("samples", [BATCH, BATCH + 1, BATCH + 5])
def test_the_batches_are_those_of_the_plain_loader_down_to_a_last_one_of_one_sample(samples: int) -> None:
    check_like_plain(usual, samples=samples)


class WithLoss(nn.Module):
    """As Transformers and nanoGPT have it: targets go in, and the loss comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Any:
        logits = self.layers(inputs)
        return {"logits": logits, "loss": F.cross_entropy(logits, targets), "size": 10, "none": None}


def test_a_loss_computed_in_the_model_is_the_mean_over_the_batch() -> None:
    def body(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        optimizer.zero_grad()
        outputs = model(batch[0], targets=batch[1])
        assert (outputs["size"], outputs["none"]) == (10, None)
        outputs["loss"].backward()
        optimizer.step()
        printed.append(outputs["loss"].item())

    check_like_plain(body, WithLoss)


Loss = Callable[[Tensor, Tensor, nn.Module], Tensor]
CLASS_WEIGHTS = torch.tensor([1.0, 9.0, *[0.5] * 8])


def some_ignored(logits: Tensor, targets: Tensor) -> Tensor:
    """Targets of which the first row of a part often has none, and whole parts now and then."""
    return torch.where(logits[:, 0] > -0.1, targets, -100)


def masked_mean(logits: Tensor, targets: Tensor, model: nn.Module) -> Tensor:
    mask = (targets == 1).float() + 0.01
    return (logits.square().mean(1) * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, targets, model: F.cross_entropy(logits, targets, weight=CLASS_WEIGHTS),
        lambda logits, targets, model: F.cross_entropy(logits, some_ignored(logits, targets)),
        lambda logits, targets, model: (
            0.5 * F.cross_entropy(logits, some_ignored(logits, targets), label_smoothing=0.1)
        ),
        masked_mean,
        lambda logits, targets, model: F.cross_entropy(logits, targets, reduction="sum") / 100,
        lambda logits, targets, model: logits.square().sum() / len(logits),
        lambda logits, targets, model: logits.square().sum() / 64,
        lambda logits, targets, model: logits.square().sum() / (targets >= 0).sum(),
        lambda logits, targets, model: F.binary_cross_entropy_with_logits(logits, (logits > 0).float()),
        lambda logits, targets, model: logits.square().mean((-1, 0)),
        lambda logits, targets, model: 0.01 * logits.square().sum((0, 1)),
        lambda logits, targets, model: (
            F.cross_entropy(logits, targets, weight=CLASS_WEIGHTS)
            + 0.01 * sum(each.square().sum() for each in model.parameters())
        ),
    ],
    ids=[
        "weights",
        "ignored",
        "smoothed",
        "masked",
        "sum",
        "by rows",
        "by number",
        "by count",
        "elements",
        "means",
        "sums",
        "penalty",
    ],
)
def test_a_loss_in_the_model_with_weights_of_its_own_is_that_of_the_whole_batch(loss: Loss) -> None:
    class Weighted(WithLoss):
        def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
            assert targets is not None
            return loss(self.layers(inputs), targets, self)

    def body(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        optimizer.zero_grad()
        value = model(batch[0], batch[1])
        value.backward()
        optimizer.step()
        printed.append(value.item())

    check_like_plain(body, Weighted)


def varying_divisor(logits: Tensor) -> Tensor:
    mask = logits[:, 0] > 0
    return (logits.square().mean(1) * mask).sum() / max(1, int(mask.sum()))


@pytest.mark.parametrize(
    "output",
    [
        lambda logits: logits.square().mean() + logits.square().sum(),
        lambda logits: (logits.square().sum() + logits.sum()) / len(logits),
        lambda logits: logits.mean(0).square().sum(),
        lambda logits: torch.stack([logits.mean(), logits.square().mean()]).sum(),
        lambda logits: logits.square().mean() if (logits[:, 0] > 0.3).any() else logits.sum() * 0,
        lambda logits: F.mse_loss(logits[logits[:, 0] > 0], logits[logits[:, 0] > 0] * 0),
        lambda logits: logits.square().sum().div_(16),
        lambda logits: 1 - logits.mean(),
        lambda logits: logits.square().sum() + 1.0,
        varying_divisor,
    ],
    ids=lambda each: "",
)
def test_a_single_value_is_that_of_the_whole_batch_whatever_it_is(output: Callable[[Tensor], Tensor]) -> None:
    """Where that is not certain, each worker computes the model in full, with its running statistics."""

    class Adding(Normalized):
        def forward(self, inputs: Tensor) -> Tensor:
            return output(super().forward(inputs))

    def body(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        optimizer.zero_grad()
        value = model.eval()(batch[0])  # so that statistics are those of all
        value.backward()
        optimizer.step()
        printed += [value.item(), sum(each.sum().item() for each in model.buffers())]

    check_like_plain(body, Adding, tolerance=1e-4)


def test_a_model_that_is_computed_in_full_is_named_and_keeps_its_statistics(capsys: pytest.CaptureFixture[str]) -> None:
    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 10))

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.layers(inputs)
            return outputs.std()

    def body(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        optimizer.zero_grad()
        model(batch[0]).backward()
        optimizer.step()
        printed += [each.sum().item() for each in model.buffers()]

    check_like_plain(body, Adding, tolerance=1e-4)
    assert "it is not certain how a single value" in capsys.readouterr().err


def test_a_model_may_be_called_twice_and_without_gradients_in_a_body() -> None:
    def body(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        optimizer.zero_grad()
        with torch.no_grad():
            target = model(batch[0] + 0.1)
        loss = F.mse_loss(model(batch[0]), target) + F.cross_entropy(model(2 * batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        printed.append(loss.item())

    check_like_plain(body)


def test_backward_passes_are_those_of_pytorch() -> None:
    """With gradients of outputs, of several values at once, and of parameters alone, for which calls are in full."""

    def body(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        optimizer.zero_grad()
        outputs = model(batch[0])
        outputs.backward(torch.ones_like(outputs) / 100)
        outputs = model(batch[0] + 1)
        torch.autograd.backward([outputs.mean(), outputs.square().mean()])
        with undivided():
            model(batch[0] - 1).square().mean().backward(inputs=[model[0].weight])
            (gradient,) = torch.autograd.grad(model(batch[0]).square().mean(), [model[2].weight])
        optimizer.step()
        printed += [gradient.sum().item(), outputs.mean().item()]

    check_like_plain(body)


def test_a_gradient_that_does_not_reach_through_a_divided_call_is_named() -> None:
    def body(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        torch.autograd.grad(model(batch[0]).square().mean(), [model[2].weight])

    with pytest.raises(UsageError, match=r"does not reach through a prepared model.*undivided"):
        train(body, shards=SHARDS)


def test_parameters_used_outside_of_calls_get_their_gradients_once() -> None:
    def body(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        (loss + 0.1 * sum(parameter.square().sum() for parameter in model.parameters())).backward()
        loss = F.cross_entropy(model[2](model[1](model[0](batch[0]))), batch[1])  # by its modules: in full
        loss.backward()
        optimizer.step()
        printed.append(loss.item())

    check_like_plain(body)


def test_a_frozen_part_stays_as_it_is_and_an_unused_one_has_no_gradient() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.unused, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 10)
            self.frozen.requires_grad_(False)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.head(self.frozen(inputs).relu())
            return outputs

    def body(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        usual(model, optimizer, place, batch, printed)
        assert model.unused.weight.grad is None
        assert model.frozen.weight.grad is None

    check_like_plain(body, Partly)


def test_closures_of_an_optimizer_are_evaluated_as_often_as_it_likes() -> None:
    def body(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        if not hasattr(model, "lbfgs"):
            object.__setattr__(model, "lbfgs", torch.optim.LBFGS(model.parameters(), max_iter=3))

        def closure() -> Tensor:
            model.lbfgs.zero_grad()
            loss = F.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            return loss

        printed.append(model.lbfgs.step(closure).item())

    check_like_plain(body, tolerance=1e-2)  # it amplifies rounding


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 10))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs


def test_batch_norm_and_dropout_are_by_shards_and_the_same_in_each_run() -> None:
    first, second = (train(usual, Normalized, shards=SHARDS) for _ in range(2))
    assert all(map(torch.equal, first.parameters, second.parameters))
    assert first.printed == second.printed


def test_statistics_are_those_of_all_shards_after_the_call() -> None:
    def run() -> tuple[Tensor, Tensor, Tensor]:
        enter_session(SoloSession())
        torch.manual_seed(0)
        model: Any = Normalized()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, _, loader = prepare(model, optimizer, DataLoader(dataset(), batch_size=SAMPLES), body="batch")
        for _ in loader.epochs(1):
            for inputs, _ in loader:
                hidden = model.layers[0](inputs).detach()
                model(inputs).sum().backward()
                found = model.layers[1].running_mean.clone()
        return hidden.mean(0), found, model.layers[1].running_mean

    mean, found, after = Context().run(run)
    torch.testing.assert_close(found, 0.1 * mean)
    assert torch.equal(found, after)


def gan(*, is_plain: bool) -> Trained:
    """Two optimizers, three backward passes, one of them through both models; as people write it."""
    enter_session(SoloSession())
    torch.manual_seed(0)
    maker: Any = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    critic: Any = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    first, second = (torch.optim.Adam(model.parameters(), lr=2e-3) for model in (critic, maker))
    loader: Any = DataLoader(dataset(), batch_size=BATCH)
    epochs: Any = range(EPOCHS)
    if not is_plain:
        (maker, critic), _, loader = prepare([maker, critic], [first, second], loader, body="batch", num_shards=SHARDS)
        epochs = loader.epochs(EPOCHS)
    printed = []
    for epoch in epochs:
        for number, (real, _) in enumerate(loader):
            noise = torch.randn(len(real), 4, generator=torch.Generator().manual_seed(100 * epoch + number))
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            first.zero_grad()
            F.binary_cross_entropy_with_logits(critic(real), ones).backward()
            fake = maker(noise)
            F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros).backward()
            first.step()
            second.zero_grad()
            loss = F.binary_cross_entropy_with_logits(critic(fake), ones)
            loss.backward()
            second.step()
            printed.append(loss.item())
    return Trained([each.detach() for model in (maker, critic) for each in model.parameters()], printed)


def test_a_gan_trains_as_written() -> None:
    expected, found = (Context().run(gan, is_plain=is_plain) for is_plain in (True, False))
    assert found.printed == pytest.approx(expected.printed, rel=1e-5)
    for one, other in zip(found.parameters, expected.parameters, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def penalized(how: Callable[[], AbstractContextManager[None]]) -> Body:
    def body(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        optimizer.zero_grad()
        inputs = batch[0].clone().requires_grad_()
        with how():
            outputs = model(inputs)
        (gradient,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        loss = F.cross_entropy(model(batch[0]), batch[1]) + (gradient.norm(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        printed.append(loss.item())

    return body


def test_a_gradient_of_a_gradient_is_refused_and_can_be_computed_in_full() -> None:
    with pytest.raises(UsageError, match=r"create_graph=True.*with resile.training.undivided\(\)"):
        train(penalized(nullcontext), shards=SHARDS)
    check_like_plain(penalized(undivided))


def test_a_copy_of_a_prepared_model_is_a_plain_model() -> None:
    copies: list[Any] = []

    def body(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        copied = copy.deepcopy(model)
        assert torch.equal(copied(batch[0]), model(batch[0]))
        copies.append(copied)
        usual(model, optimizer, place, batch, printed)

    train(body, shards=SHARDS)
    parameters = copies[0][0].weight
    assert copies[0](torch.ones(2, 8)).shape == (2, 10)
    copies[0](torch.ones(2, 8)).sum().backward()
    assert parameters.grad is not None


class Recorded(SoloSession):
    """Records what each round has returned, as late as another member may ask for it: as it ends the next round."""

    def __init__(self, rounds: list[RepeatedRounds]) -> None:
        super().__init__()
        self._rounds = rounds
        self.outcomes: dict[int, FlatCopy] = {}

    def begin(self, spec: RoundSpec) -> ExchangeRound:
        opened = super().begin(spec)
        finish = opened.finish

        def recorded(header: bytes, *, may_leave: bool = False) -> Any:
            flat = self._rounds[-1]._outcome.flatten()
            self.outcomes[spec.tag.round - 1] = flat.skeleton, [tensor.clone() for tensor in flat.tensors]
            return finish(header, may_leave=may_leave)

        opened.finish = recorded  # type: ignore[method-assign]
        return opened


class Losing(SoloSession):
    """Loses a member in a round: others have completed it, with ``outcome``, or nobody has."""

    def __init__(self, round_: int, outcome: FlatCopy | None) -> None:
        super().__init__()
        self._round: int | None = round_
        self._outcome = outcome

    def begin(self, spec: RoundSpec) -> ExchangeRound:
        opened = super().begin(spec)
        if spec.tag.round == self._round:
            self._round = None

            def finish(header: bytes, *, may_leave: bool = False) -> tuple[bytes, ...]:
                for sums in spec.sums:
                    sums.fill_(7.0)  # what an abandoned round leaves
                raise Abandoned(1, "it was killed")

            opened.finish = finish  # type: ignore[method-assign]
        return opened

    def recover(self, lost: Abandoned, *, next_round: int, state: Any) -> bool:
        if self._outcome is None:
            return False
        for mine, theirs in zip(state.allocate_buffers(self._outcome[0]), self._outcome[1], strict=True):
            mine.copy_(theirs)
        state.load_received()
        return True


class Drifting(Normalized):
    """Its outputs depend on a buffer that each call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_scale", torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs) * self.running_scale.clone()
        self.running_scale += 0.1 * inputs.detach().mean()
        return outputs


class Remembering(Drifting):
    """It counts, and keeps what it has seen in slots; outputs depend on both."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("largest", torch.full((8,), -torch.inf))
        self.register_buffer("queue", torch.zeros(8, 80))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))
        buffers(self, seen="sum", largest="max", queue="concat", pointer="concat")

    def forward(self, inputs: Tensor) -> Tensor:
        kept = self.queue.mean() + self.largest.clamp(min=-1).mean() + self.seen * 1e-3
        self.seen += len(inputs)
        self.largest = torch.maximum(self.largest, inputs.detach().amax(0))
        self.queue[:, (self.pointer + torch.arange(len(inputs))) % 80] = inputs.detach().T
        self.pointer.copy_((self.pointer + len(inputs)) % 80)
        return super().forward(inputs) + kept


def remembered(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
    twice(model, optimizer, place, batch, printed)
    printed += [each.double().sum().item() for each in (model.seen, model.largest, model.queue, model.pointer)]


def twice(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
    """Two calls with running statistics and then two backward passes, without a round between them."""
    optimizer.zero_grad()
    first, second = F.cross_entropy(model(batch[0]), batch[1]), model(batch[0] + 1).square().mean()
    first.backward()
    second.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # in place
    optimizer.step()
    printed += [first.item(), second.item(), model.layers[1].running_mean.sum().item()]


def with_input_gradients(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
    """Inputs by rows, and one of all rows, are given gradients, which the body uses."""
    optimizer.zero_grad()
    inputs, shift, unused = batch[0].clone().requires_grad_(), torch.zeros(8, requires_grad=True), batch[0] + 0
    unused.requires_grad_()
    loss = F.cross_entropy(model(inputs, shift, unused), batch[1])
    loss.backward()
    assert unused.grad is None
    assert inputs.grad is not None
    assert shift.grad is not None
    optimizer.param_groups[0]["lr"] = 1e-2 * (1 + inputs.grad.abs().sum().item())
    optimizer.step()
    printed += [loss.item(), inputs.grad.square().sum().item(), shift.grad[0].item()]


class Shifted(Drifting):
    def forward(self, inputs: Tensor, shift: Tensor, unused: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(inputs + shift)


@pytest.mark.parametrize(
    ("body", "make", "most_bytes", "is_late", "sends_changes"),
    [
        (twice, Drifting, None, False, True),
        (twice, Drifting, 300, False, True),
        (twice, Drifting, None, True, True),
        (with_input_gradients, Shifted, 300, False, True),
        (remembered, Remembering, None, False, False),
    ],
)
def test_a_member_that_is_lost_in_any_round_is_replaced_in_it(
    body: Body,
    make: Callable[[], nn.Module],
    most_bytes: int | None,
    is_late: bool,
    sends_changes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where outputs take several rounds, of ``most_bytes`` each, or are sent when they are used.

    Changes of buffers are sent in headers, or in a round of their own.
    """
    if not sends_changes:
        monkeypatch.setattr(training_buffers, "MAX_SENT_BYTES", 0)
    if is_late:
        monkeypatch.setattr(passes, "MAX_SENT_BYTES", 0)
        monkeypatch.setattr(call.Call, "_is_alone", False)
    if most_bytes is not None:
        monkeypatch.setattr(call, "MAX_BYTES", most_bytes)
        monkeypatch.setattr(gathering, "_LEAST", most_bytes)
        monkeypatch.setattr(call.Call, "_is_alone", False)  # or it would send nothing
    opened: list[RepeatedRounds] = []
    begin = RepeatedRounds.__init__

    def noted(self: RepeatedRounds, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        opened.append(self)

    monkeypatch.setattr(RepeatedRounds, "__init__", noted)
    recorded = Recorded(opened)
    undisturbed = train(body, make, shards=SHARDS, session=recorded)
    num_rounds = max(recorded.outcomes) - 1
    assert num_rounds >= (4 if most_bytes is None else 12) * EPOCHS * (SAMPLES // BATCH)
    for round_ in range(1, num_rounds, 1 if most_bytes is None else 5):
        for outcome in (None, recorded.outcomes[round_]):
            found = train(body, make, shards=SHARDS, session=Losing(round_, outcome))
            assert found.printed == undisturbed.printed
            assert all(map(torch.equal, found.parameters, undisturbed.parameters))


def halve_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 0.5


class Hooked(nn.Module):
    """Its gradients are clipped by hooks, and halved when they were added."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()
        for parameter in self.layers.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            parameter.register_post_accumulate_grad_hook(halve_gradient)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs


def test_hooks_of_parameters_get_the_gradients_of_the_batch() -> None:
    check_like_plain(usual, Hooked)


class Drawing(nn.Module):
    """It draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()
        self.noise = torch.Generator()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs + torch.randn(inputs.shape, generator=self.noise))
        return outputs


def test_a_model_that_draws_from_a_generator_of_its_own_is_named() -> None:
    with pytest.raises(UsageError, match=r"the model draws from a generator of its own, model\.noise"):
        train(usual, Drawing, shards=SHARDS)


class DrawnSamples(TensorDataset):
    """Its samples depend on which were read before."""

    def __init__(self) -> None:
        super().__init__(*dataset().tensors)
        self.noise = torch.Generator()

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, target = super().__getitem__(index)
        return inputs + torch.randn(inputs.shape, generator=self.noise), target


def test_a_dataset_that_draws_from_a_generator_of_its_own_is_named() -> None:
    def run() -> None:
        enter_session(SoloSession())
        model = perceptron()
        loader: Any = DataLoader(DrawnSamples(), batch_size=BATCH)
        _, _, loader = prepare(model, torch.optim.SGD(model.parameters()), loader)
        for _ in loader.epochs(1):
            next(iter(loader))

    with pytest.raises(UsageError, match=r"the dataset \(or the collate_fn\) gives other samples when"):
        Context().run(run)


class InPlace(nn.Module):
    """It changes its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs.sub_(0.5).mul_(2))
        return outputs


def looked_at_afterwards(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
    usual(model, optimizer, place, batch, printed)
    printed.append(batch[0].sum().item())


def test_a_model_that_changes_its_inputs_changes_them_once(capsys: pytest.CaptureFixture[str]) -> None:
    check_like_plain(looked_at_afterwards, InPlace, tolerance=1e-4)
    assert "the model changes its inputs in place" in capsys.readouterr().err


def changed_before_backward(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    batch[0].zero_()
    loss.backward()


def stepped_before_backward(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
    first, second = F.cross_entropy(model(batch[0]), batch[1]), F.cross_entropy(model(batch[0] + 1), batch[1])
    first.backward()
    optimizer.step()
    second.backward()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (changed_before_backward, "an input of the model was changed in place after the call"),
        (stepped_before_backward, "parameters of the model were changed after a call and before its backward pass"),
    ],
)
def test_what_a_backward_pass_needs_and_the_body_has_changed_is_named(body: Body, says: str) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train(body, shards=None)
    with pytest.raises(UsageError, match=says):
        train(body, shards=SHARDS, recompute=True)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@pytest.mark.parametrize(
    "function",
    [
        Doubled.apply,
        torch.func.vmap(lambda row: row * 2),
        lambda values: values.as_subclass(Tensor) * 2,
        lambda values: torch.utils.checkpoint.checkpoint(lambda it: it * 2, values, use_reentrant=True),
        torch.compile(lambda values: values * 2, backend="eager"),
    ],
)
def test_gradients_of_large_outputs_pass_through_functions(
    function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def through(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        optimizer.zero_grad()
        logits, loss = model(*batch)
        loss = loss + function(logits).square().mean()
        loss.backward()
        optimizer.step()
        printed.append(loss.item())

    monkeypatch.setattr(passes, "MAX_SENT_BYTES", 0)
    check_like_plain(through, LossBeside)


def test_a_model_of_lists_of_samples_is_computed_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    class OfLists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = perceptron()

        def forward(self, samples: list[Tensor]) -> Tensor:
            outputs: Tensor = self.layers(torch.stack(samples))
            return outputs

    def of_lists(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        usual(lambda inputs: model(list(inputs)), optimizer, place, batch, printed)

    check_like_plain(of_lists, OfLists)
    assert "called with a list of samples" in capsys.readouterr().err


class OfEpochs(TensorDataset):
    """Its samples depend on the epoch that the script sets."""

    epoch = 0

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, target = super().__getitem__(index)
        return inputs + self.epoch, target


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_a_script_changes_in_its_dataset_before_an_epoch_holds_for_its_first_batch(num_workers: int) -> None:
    def run() -> list[float]:
        enter_session(SoloSession())
        model, data = perceptron(), OfEpochs(*dataset().tensors)
        loader: Any = DataLoader(data, batch_size=BATCH, num_workers=num_workers)
        _, _, loader = prepare(model, torch.optim.SGD(model.parameters()), loader)
        shifts = []
        for epoch in loader.epochs(3):
            data.epoch = 10 * epoch
            for number, (inputs, _) in enumerate(loader):
                expected = dataset().tensors[0][BATCH * number]
                shifts.append(float((inputs[0] - expected).mean().round()))
        return shifts

    assert Context().run(run) == [0.0] * 3 + [10.0] * 3 + [20.0] * 3


class LossBeside(nn.Module):
    """It returns its loss, and what it was computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.layers(inputs)
        return logits, F.cross_entropy(logits, targets)


def beside(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
    """The logits are used without gradients, then with them, and in an accuracy after the step."""
    optimizer.zero_grad()
    logits, loss = model(*batch)
    with torch.no_grad():
        printed.append(logits.mean().item())
    (loss + 1e-2 * logits.square().mean()).backward()
    optimizer.step()
    printed += [loss.item(), (logits.argmax(1) == batch[1]).float().mean().item()]


def unused(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
    """Of the logits the shape alone is used."""
    optimizer.zero_grad()
    logits, loss = model(*batch)
    loss.backward()
    optimizer.step()
    printed.append(logits.shape[1])


@pytest.mark.parametrize(
    ("body", "make"), [(everything, perceptron), (beside, LossBeside), (unused, LossBeside)], ids=lambda it: it.__name__
)
def test_large_outputs_are_sent_when_they_are_used(
    body: Body, make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    late = call.Call.late

    def noted(self: call.Call, number: int) -> Tensor:
        sent.append(number)
        return late(self, number)

    monkeypatch.setattr(passes, "MAX_SENT_BYTES", 0)
    monkeypatch.setattr(call.Call, "late", noted)
    check_like_plain(body, make)
    assert len(sent) == (0 if body is unused else 2 * EPOCHS * (SAMPLES // BATCH))


def in_metrics(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
    """The logits are first used after the step."""
    optimizer.zero_grad()
    logits, loss = model(*batch)
    loss.backward()
    optimizer.step()
    printed += [loss.item(), logits.square().mean().item()]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_large_output_that_is_used_after_the_backward_pass_is_sent_with_the_next_calls(
    recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(in_metrics, LossBeside, shards=SHARDS)
    monkeypatch.setattr(passes, "MAX_SENT_BYTES", 0)
    sent: list[int] = []
    late = call.Call.late
    monkeypatch.setattr(call.Call, "late", lambda self, number: sent.append(number) or late(self, number))
    found = train(in_metrics, LossBeside, shards=SHARDS, recompute=recompute)
    assert found.printed == expected.printed
    assert all(map(torch.equal, found.parameters, expected.parameters))
    assert sent == [0]


def test_a_worker_that_is_lost_with_an_output_that_nobody_can_compute_again_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passes, "MAX_SENT_BYTES", 0)
    late = passes.Passes.late

    def lost(self: passes.Passes, shard: int, number: int, *, is_over: bool) -> Tensor | None:
        if shard == 3:
            self._left.pop(shard)
        return late(self, shard, number, is_over=is_over)

    monkeypatch.setattr(passes.Passes, "late", lost)
    with pytest.raises(StateLost):
        train(in_metrics, LossBeside, shards=SHARDS)


def test_an_output_that_is_used_in_a_later_iteration_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Tensor] = []

    def later(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        logits, loss = model(*batch)
        loss.backward()
        kept.append(logits)
        kept[0].argmax(1) if len(kept) > 1 else None

    monkeypatch.setattr(passes, "MAX_SENT_BYTES", 0)
    with pytest.raises(UsageError, match="was first used in a later iteration"):
        train(later, LossBeside, shards=SHARDS)


def test_a_model_whose_output_is_too_large_to_be_sent_for_each_batch_is_computed_in_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(passes, "MAX_SENT_BYTES", 0)
    monkeypatch.setattr(call, "MAX_OUTPUT_BYTES", 0)
    check_like_plain(usual)
    assert capsys.readouterr().err.count("all workers would receive it: each computes the model in full") == 2


class Renormalized(nn.Module):
    """Its forward pass scales the rows of a table that it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8, max_norm=0.5)
        self.last = nn.Linear(8, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.table((inputs[:, 0].abs() * 8).long().clamp(max=15)))
        return outputs


def test_a_model_that_changes_its_parameters_when_it_is_called_is_computed_in_full(
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_like_plain(usual, Renormalized)
    assert "changes its parameters in place when it is called" in capsys.readouterr().err


def adapted(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
    """A step with a gradient of a gradient, through weights that the model has for one call alone."""
    optimizer.zero_grad()
    inputs, targets = batch
    with undivided():
        inner = F.cross_entropy(model(inputs[::2]), targets[::2])
    gradients = torch.autograd.grad(inner, list(model.parameters()), create_graph=True)
    fast = {name: own - 0.1 * each for (name, own), each in zip(model.named_parameters(), gradients, strict=True)}
    loss = F.cross_entropy(torch.func.functional_call(model, fast, (inputs,)), targets)
    loss.backward()
    optimizer.step()
    printed.append(loss.item())


def test_a_call_with_other_parameters_than_the_models_is_computed_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    check_like_plain(adapted)
    assert capsys.readouterr().err.count("called with other parameters than its own") == 2, "once in each run"


def gradient_surgery(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
    """Gradients of two losses, of which one loses what points against the other."""
    inputs, targets = batch
    with undivided():
        outputs = model(inputs)
    losses = [F.cross_entropy(outputs, targets), outputs.square().mean()]
    each = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    for parameter, one, other in zip(model.parameters(), *each, strict=True):
        product = (one * other).sum()
        parameter.grad = one + other - product.clamp(max=0.0) / other.square().sum() * other
    optimizer.step()
    printed.append(losses[0].item())


def stepped_in_hooks() -> nn.Module:
    """Each parameter has an optimizer, which steps as soon as the gradient is there."""
    model = perceptron()
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)

        def step(parameter: Tensor, own: torch.optim.Optimizer = own) -> None:
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    return model


def without_steps(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    printed.append(loss.item())


def test_gradient_surgery_and_steps_within_a_backward_pass_train_as_in_plain_pytorch() -> None:
    check_like_plain(gradient_surgery)
    check_like_plain(without_steps, stepped_in_hooks)


def pruned(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
    if place[0] == 3:
        prune.l1_unstructured(model[0], "weight", amount=0.3)
    usual(model, optimizer, place, batch, printed)


def with_mask() -> nn.Module:
    model: Any = perceptron()
    prune.identity(model[0], "weight")
    return model


@pytest.mark.parametrize("make", [perceptron, with_mask])
def test_a_layer_may_be_pruned_while_it_trains(make: Callable[[], nn.Module]) -> None:
    check_like_plain(pruned, make)


def two_steps(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
    """A step of SAM, as written: with the gradients where the first ones point to."""
    inputs, targets = batch
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
        for parameter in model.parameters():
            parameter.add_(parameter.grad, alpha=0.05 / float(norm))
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), targets).backward()
    with torch.no_grad():
        for parameter, earlier in zip(model.parameters(), before, strict=True):
            parameter.copy_(earlier)
    optimizer.step()
    printed.append(loss.item())


def test_an_optimizer_in_two_steps_has_the_gradients_of_the_whole_batch() -> None:
    check_like_plain(two_steps)


def test_a_hook_of_a_layer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def observed() -> nn.Module:
        model = perceptron()
        model[1].register_forward_hook(lambda *_: None)
        return model

    train(usual, observed, shards=SHARDS)
    assert "the layer 1 of the model has a hook" in capsys.readouterr().err


class Stochastic(nn.Module):
    """It has running statistics and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 10))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs


def test_shards_that_are_computed_again_for_the_backward_pass_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = train(twice_used, Stochastic, shards=SHARDS)
    most: list[int] = []
    compute = passes.Passes._compute_rows

    def counted(self: passes.Passes, rows: slice, shard: int) -> Any:
        most.append(len(self._kept))
        return compute(self, rows, shard)

    monkeypatch.setattr(passes.Passes, "_compute_rows", counted)
    again = train(twice_used, Stochastic, shards=SHARDS, recompute=True)
    assert kept.printed == again.printed
    assert all(map(torch.equal, kept.parameters, again.parameters))
    assert max(most) == 0


def twice_used(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1]) + model(batch[0] + 1).square().mean()
    loss.backward()
    optimizer.step()
    printed += [loss.item(), model.layers[1].running_mean.sum().item()]


def test_an_error_for_a_lack_of_memory_says_what_takes_less() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = perceptron()

        def forward(self, inputs: Tensor) -> Tensor:
            torch.empty(1 << 60)
            return self.layers(inputs)

    with pytest.raises(RuntimeError) as raised:
        train(usual, Large, shards=SHARDS)
    assert "recompute=True" in raised.value.__notes__[0]


@pytest.mark.parametrize("option", [{"accumulate": 2}, {"mode": "fast"}, {"mode": "fast", "micro_batch_size": 4}])
def test_an_option_that_such_a_loop_cannot_have_is_named(option: Any) -> None:
    model = perceptron()
    loader = DataLoader(dataset(), batch_size=BATCH)
    with pytest.raises(UsageError, match=f"was given {next(iter(option))}, which"):
        Context().run(prepare, model, torch.optim.SGD(model.parameters()), loader, body="batch", **option)


def test_a_joiner_notices_that_it_was_given_the_outcome_of_a_round_instead_of_a_state() -> None:
    given = RoundOutcome(TrainingProgress).flatten()
    state = RunState(perceptron(), {}, {}, after_load=lambda: None)
    for target, value in zip(state.allocate_buffers(given.skeleton), given.tensors, strict=True):
        target.copy_(value)
    with pytest.raises(NoState):
        state.load_received()


@dataclasses.dataclass
class Unknown:
    logits: Tensor


def test_outputs_that_have_no_mean_are_named() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = perceptron()

        def forward(self, inputs: Tensor) -> Any:
            logits = self.layers(inputs)
            return logits, logits.sum().item()

    with pytest.raises(UsageError, match="which has no mean: return numbers as tensors"):
        train(usual, Other, shards=SHARDS)


def test_an_output_in_which_tensors_cannot_be_found_is_computed_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = perceptron()

        def forward(self, inputs: Tensor) -> Any:
            return Unknown(self.layers(inputs))

    def body(model: Any, optimizer: Any, place: Any, batch: Any, printed: list[float]) -> None:
        usual(lambda inputs: model(inputs).logits, optimizer, place, batch, printed)

    check_like_plain(body, Other)
    assert "an output of the model is a Unknown" in capsys.readouterr().err
