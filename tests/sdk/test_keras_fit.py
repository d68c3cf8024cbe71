"""Keras' fit, elastic: what Keras computes, and every argument and callback either works or is refused."""

import csv
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import Context
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import pytest
import torch
from keras import callbacks, layers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resile.integrations.keras import KerasModule, elastic
from resile.integrations.keras.callbacks import REFUSED, checked_callbacks, save_on_lowest_rank
from resile.integrations.keras.progress import CompiledVariables
from resile.training import prepare
from resile_learner.session import SoloSession, enter_session
from resile_learner.training.digest import params_sha256
from resile_shared.errors import UsageError
from tests.learner.recorded_sessions import AtBoundaries, Joining

from .late_joiner import train_and_join_late

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:keras", "ignore::UserWarning")
NUM = 150
KEPT_CALLBACKS = """
    CSVLogger Callback CallbackList EarlyStopping History LambdaCallback LearningRateScheduler ModelCheckpoint
    ProgbarLogger ReduceLROnPlateau RemoteMonitor SwapEMAWeights TensorBoard TerminateOnNaN
"""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Data(NamedTuple):
    x: Any
    y: Any
    more: Mapping[str, Any] = MappingProxyType({})


Guide = Callable[[], tuple[keras.Model, Data]]


def features(*shape: int) -> Any:
    return np.random.default_rng(0).normal(size=(NUM, *shape))


def perceptron(**compiled: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(16, activation="relu"), layers.Dense(2)])
    usual = {"optimizer": "sgd", "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    model.compile(**{**usual, "metrics": ["accuracy"], **compiled})
    return model


def classes() -> Data:
    x = features(6)
    return Data(x, (x.sum(1) > 0).astype("int64"))


def dense() -> tuple[keras.Model, Data]:
    optimizer = keras.optimizers.AdamW(1e-2, global_clipnorm=0.5, use_ema=True, ema_overwrite_frequency=4)
    x, y, _ = classes()
    held = [callbacks.ReduceLROnPlateau(patience=0, min_delta=1.0), callbacks.SwapEMAWeights(swap_on_epoch=True)]
    return perceptron(optimizer=optimizer), Data(x, y, {"validation_split": 0.2, "callbacks": held})


def scheduled() -> tuple[keras.Model, Data]:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.2, 3, 0.7)
    optimizer = keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True, gradient_accumulation_steps=2, clipnorm=0.3)
    return perceptron(optimizer=optimizer), classes()


def regularized() -> tuple[keras.Model, Data]:
    """Penalties on weights, and a loss that a layer adds."""

    class Added(keras.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
            return x

    model = keras.Sequential([keras.Input((6,)), layers.Dense(4, kernel_regularizer="l2"), Added(), layers.Dense(2)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model, classes()


def active() -> tuple[keras.Model, Data]:
    """It is not certain how penalties on activities combine: the model is computed in full."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4, activity_regularizer="l2"), layers.Dense(2)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, classes()


def weighted() -> tuple[keras.Model, Data]:
    x, y, _ = classes()
    model = perceptron(weighted_metrics=["accuracy", keras.metrics.SparseCategoricalCrossentropy(from_logits=True)])
    return model, Data(x, y, {"sample_weight": np.arange(NUM) % 7 / 3.0})


def weighted_by_class() -> tuple[keras.Model, Data]:
    x, y, _ = classes()
    return perceptron(weighted_metrics=["accuracy"]), Data(x, y, {"class_weight": {0: 0.2, 1: 3.0}})


def weighted_mean() -> tuple[keras.Model, Data]:
    """A loss that is divided by the sum of the weights."""
    x, y, _ = classes()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    return perceptron(loss=loss), Data(x, y, {"sample_weight": np.arange(NUM) % 7 / 3.0})


def summed() -> tuple[keras.Model, Data]:
    x = features(6)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-4), keras.losses.MeanSquaredError(reduction="sum"), metrics=["mae"])
    return model, Data(x, x.sum(1, keepdims=True))


def masked() -> tuple[keras.Model, Data]:
    """Outputs for each step of time, and a loss over those steps that are not masked."""
    ids = np.random.default_rng(1).integers(0, 4, (NUM, 5))
    model = keras.Sequential(
        [keras.Input((5,), dtype="int32"), layers.Embedding(4, 6, mask_zero=True), layers.GRU(6, return_sequences=True)]
    )
    model.add(layers.Dense(1))
    model.compile("sgd", "mse", metrics=["mae"], weighted_metrics=["mse"])
    return model, Data(ids, (ids % 3)[..., None].astype("float32"))


def two_inputs(names: bool = True) -> tuple[keras.Model, Data]:
    ids, values = np.random.default_rng(1).integers(0, 9, (NUM, 4)), features(3)
    first, second = keras.Input((4,), name="ids", dtype="int32"), keras.Input((3,), name="values")
    hidden = layers.Concatenate()([layers.LSTM(4)(layers.Embedding(9, 4, mask_zero=True)(first)), second])
    outputs = {"is": layers.Dense(1, "sigmoid", name="is")(hidden), "has": layers.Dense(2, name="has")(hidden)}
    model = keras.Model([first, second], outputs)
    model.compile(
        keras.optimizers.Adam(1e-2),
        loss={"is": "binary_crossentropy", "has": "mse"},
        loss_weights={"is": 1.0, "has": 0.3},
        metrics={"is": [keras.metrics.AUC(), "accuracy"], "has": "mae"},
    )
    y = {"is": (values[:, :1] > 0).astype("float32"), "has": values[:, 1:]}
    return model, Data({"ids": ids, "values": values} if names else [ids, values], y)


def own_step() -> tuple[keras.Model, Data]:
    """A training step of the script's own, with a metric of its own, as the guides have it."""

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(1)
            self.tracker = keras.metrics.Mean(name="mine")

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            self.zero_grad()
            loss = keras.ops.mean((self(x, training=True) - y) ** 2)
            loss.backward()
            with torch.no_grad():
                self.optimizer.apply([each.value.grad for each in self.trainable_weights], self.trainable_weights)
            self.tracker.update_state(loss)
            return {"mine": self.tracker.result()}

        @property
        def metrics(self) -> list[Any]:
            return [self.tracker]

    model = Own()
    model.compile("adam", "mse")
    return model, Data(features(6), features(6)[:, :1])


def gan(*, is_built: bool = True) -> tuple[keras.Model, Data]:
    """Two models with an optimizer each, as the guides have them."""

    class Gan(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.critic = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.Dropout(0.2), layers.Dense(1)])
            self.maker = keras.Sequential([keras.Input((3,)), layers.Dense(8), layers.BatchNormalization()])
            self.maker.add(layers.Dense(6))
            self.seeds = keras.random.SeedGenerator(1)
            self.first, self.second = keras.optimizers.Adam(1e-2), keras.optimizers.Adam(1e-2)
            if is_built:
                self.first.build(self.critic.trainable_variables)
                self.second.build(self.maker.trainable_variables)
            self.built = True

        def step(self, part: Any, optimizer: Any, logits: Any, target: float) -> Any:
            self.zero_grad()
            losses = keras.losses.binary_crossentropy(keras.ops.full_like(logits, target), logits, from_logits=True)
            loss = keras.ops.mean(losses)
            loss.backward()
            with torch.no_grad():
                optimizer.apply([each.value.grad for each in part.trainable_weights], part.trainable_weights)
            return loss

        def train_step(self, data: Any) -> dict[str, Any]:
            x = data[0] if isinstance(data, tuple) else data
            made = self.maker(keras.random.normal((len(x), 3), seed=self.seeds), training=True)
            both = self.critic(torch.cat([x, made.detach()]), training=True)
            self.step(self.critic, self.first, both[: len(x)], 1.0)
            made = self.maker(keras.random.normal((len(x), 3), seed=self.seeds), training=True)
            return {"maker": self.step(self.maker, self.second, self.critic(made, training=True), 1.0)}

    model = Gan()
    model.compile()
    return model, Data(features(6).astype("float32"), None)


class Batches(keras.utils.PyDataset):
    """Batches that are shuffled after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y, _ = classes()
        self.order = np.arange(NUM)

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        chosen = self.order[30 * index : 30 * index + 30]
        return self.x[chosen].astype("float32"), self.y[chosen]

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


class OrderedBatches(Batches):
    def on_epoch_end(self) -> None:
        """Keep the order, which is drawn from other seeds than in Keras."""


def of_py_dataset() -> tuple[keras.Model, Data]:
    return perceptron(), Data(OrderedBatches(), None, {"batch_size": None, "class_weight": {0: 1.0, 1: 2.0}})


def of_loader() -> tuple[keras.Model, Data]:
    x, y, _ = classes()
    data = TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y))
    return perceptron(), Data(DataLoader(data, batch_size=32), None, {"batch_size": None})


def frozen() -> tuple[keras.Model, Data]:
    """Layers that do not learn, among them statistics that do not change."""
    first = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.BatchNormalization(), layers.ReLU()])
    first.trainable = False
    model = keras.Sequential([first, layers.Dense(8), layers.Dense(2)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, classes()


def half() -> tuple[keras.Model, Data]:
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        return perceptron(), classes()
    finally:
        keras.config.set_dtype_policy("float32")


def scaled() -> tuple[keras.Model, Data]:
    """A loss that the optimizer scales."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return perceptron(), classes()
    finally:
        keras.config.set_dtype_policy("float32")


def convolutions() -> tuple[keras.Model, Data]:
    """Layers that draw random numbers, with seeds and without, and statistics."""
    x = features(6, 6, 1).astype("float32")
    model = keras.Sequential(
        [
            *(keras.Input((6, 6, 1)), layers.RandomFlip(), layers.Conv2D(4, 3), layers.BatchNormalization()),
            *(layers.ReLU(), layers.GaussianNoise(0.1), layers.Dropout(0.2), layers.Flatten()),
            *(layers.Dropout(0.1, seed=3), layers.Dense(2, "softmax")),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    y = (x.sum((1, 2, 3)) > 0).astype("int64")
    stopping = callbacks.EarlyStopping("val_loss", mode="max", patience=1, restore_best_weights=True)
    return model, Data(x, y, {"validation_data": (x[:50], y[:50]), "callbacks": [stopping]})


GUIDES: list[Guide] = [
    *(dense, scheduled, regularized, active, weighted, weighted_by_class, weighted_mean, summed, masked, two_inputs),
    *(lambda: two_inputs(names=False), own_step, of_py_dataset, of_loader, frozen, half, scaled),
]


def trained(
    guide: Guide,
    *,
    is_elastic: bool = True,
    session: SoloSession | None = None,
    num_shards: int | None = 4,
    **more: Any,
) -> tuple[keras.Model, Any]:
    """Train in a script of its own; return the model and the history."""

    def run() -> tuple[keras.Model, Any]:
        enter_session(session or SoloSession())
        keras.utils.clear_session()
        keras.utils.set_random_seed(0)
        model, data = guide()
        if is_elastic:
            model = elastic(model, num_shards=num_shards)
        usual = {"batch_size": 32, "epochs": 3, "shuffle": False, "verbose": 0}
        return model, model.fit(data.x, data.y, **{**usual, **data.more, **more})

    return Context().run(run)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.__name__)
def test_a_model_learns_what_it_learns_in_keras(guide: Guide, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal but for the order of additions: metrics of all epochs, and all weights. The model is divided."""
    (expected, usual), (model, found) = trained(guide, is_elastic=False), trained(guide)
    shown = capsys.readouterr().err
    assert ("computes the model in full" in shown) is (guide is active)
    assert 0.0 < float(re.findall(r"iteration \d+, loss ([\d.]+)", shown)[-1]) < 5.0 or guide is summed
    tolerance = 2e-2 if guide in (half, scaled) else 1e-4
    assert found.history.keys() == usual.history.keys()
    assert found.epoch == usual.epoch
    for name, values in usual.history.items():
        assert found.history[name] == pytest.approx(values, rel=tolerance, abs=tolerance / 10), name
    for one, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=10 * tolerance, atol=tolerance)


@pytest.mark.parametrize(("guide", "size"), [(of_py_dataset, 2), (of_loader, 4), (dense, 4)])
def test_a_batch_is_cut_into_the_usual_number_of_shards(guide: Guide, size: int) -> None:
    """Of 30 and of 32 samples."""
    seen = []

    class Session(SoloSession):
        def join(self, ready: Any, state: Any) -> bool:
            seen.append(ready.num_shards)
            return super().join(ready, state)

    trained(guide, session=Session(), num_shards=None, epochs=1)
    assert seen == [size]


def statistics() -> tuple[keras.Model, Data]:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.BatchNormalization(), layers.Dense(2)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, classes()


def test_statistics_of_a_single_shard_are_those_of_keras() -> None:
    (expected, _), (model, _) = trained(statistics, is_elastic=False), trained(statistics, num_shards=1)
    for one, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_statistics_are_those_of_all_shards(capsys: pytest.CaptureFixture[str]) -> None:
    """The mean of all rows, and the mean of the variances of shards; no line says that the model is not divided."""
    model, data = statistics()
    x = data.x[:32].astype("float32")
    before = model.layers[0](x).detach().numpy()
    Context().run(lambda: elastic(model, num_shards=4).fit(x, data.y[:32], shuffle=False, verbose=0))
    norm = model.layers[1]
    shards = before.reshape(4, 8, 8)
    np.testing.assert_allclose(norm.moving_mean, 0.01 * before.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(norm.moving_variance, 0.99 + 0.01 * shards.var(1).mean(0), rtol=1e-4)
    assert "in full" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "guide", [dense, convolutions, two_inputs, gan, lambda: (perceptron(), Data(Batches(), None, {"batch_size": None}))]
)
def test_a_worker_that_joins_at_any_iteration_goes_on_as_the_others_do(guide: Guide) -> None:
    ahead = AtBoundaries()
    model, expected = trained(guide, session=ahead, shuffle=True)
    for iteration in (1, 4, 5, 7):  # an epoch has 4 or 5
        joined, history = trained(guide, session=Joining(ahead.before[iteration]), shuffle=True)
        assert (history.history, history.epoch) == (expected.history, expected.epoch), iteration
        for one, other in zip(joined.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
        optimizers = [CompiledVariables(each).state_dict()["optimizer 0"] for each in (joined, model)]
        assert all(map(torch.equal, *optimizers))


def test_the_best_weights_are_the_final_ones(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Those that EarlyStopping restores are the result of the run, and so is what Keras saves of the model."""
    model, found = trained(convolutions, epochs=9)
    assert len(found.epoch) < 9
    sha = capsys.readouterr().err.rpartition("params_sha256 ")[2].strip()
    module = KerasModule(model)
    assert sha == params_sha256(module)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    x = features(6, 6, 1)
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    assert module.state_dict().keys() >= {"sequential/conv2d/kernel", "sequential/batch_normalization.running_mean"}


def test_files_are_those_of_keras(tmp_path: Path) -> None:
    files = [callbacks.CSVLogger(tmp_path / "log.csv"), callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras"))]
    trained(lambda: (perceptron(), classes()), callbacks=files)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["1.keras", "2.keras", "3.keras", "log.csv"]
    assert epochs_in(tmp_path / "log.csv") == ["0", "1", "2"]


def epochs_in(file: Path) -> list[str]:
    return [row["epoch"] for row in csv.DictReader(file.read_text().splitlines())]


def test_the_worker_with_the_lowest_rank_writes_and_another_one_goes_on_in_its_file(tmp_path: Path) -> None:
    """Two workers call the same; the first one is lost after the first epoch."""

    def act(ranks: Sequence[int]) -> None:
        session = SoloSession()
        enter_session(session)
        model = perceptron()
        save_on_lowest_rank(model)
        (logger,) = checked_callbacks([callbacks.CSVLogger(tmp_path / "log.csv")], shows_progress=False)
        for epoch, rank in enumerate(ranks):
            session.view = replace(session.view, workers=tuple(range(-rank, 1)))
            assert session.view.rank == rank
            if epoch == 0:
                logger.on_train_begin()
            logger.on_epoch_end(epoch, {"loss": 1.0 / (epoch + 1)})
            model.save_weights(tmp_path / f"{rank}.weights.h5")

    Context().run(act, [0])
    Context().run(act, [1, 0, 0])
    assert epochs_in(tmp_path / "log.csv") == ["0", "1", "2"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["0.weights.h5", "log.csv"]


def test_a_worker_that_joins_when_training_is_over_has_the_result(tmp_path: Path) -> None:
    found = []

    def run() -> None:
        keras.utils.clear_session()
        keras.utils.set_random_seed(0)
        model, data = convolutions()
        checkpoint = callbacks.ModelCheckpoint(str(tmp_path / f"{len(found)}.keras"))
        history = elastic(model, num_shards=4).fit(data.x, data.y, epochs=2, verbose=0, callbacks=[checkpoint])
        found.append((model.get_weights(), history.history))

    train_and_join_late(run, run)
    (weights, history), (joined, other) = found
    assert history == other
    assert all(map(np.array_equal, weights, joined))
    assert [each.name for each in tmp_path.iterdir()] == ["0.keras"]


def test_random_layers_do_not_depend_on_earlier_calls() -> None:
    """Their generators are seeded by iteration and shard, whatever was drawn before."""

    def drawing(guide: Guide) -> Guide:
        def make() -> tuple[keras.Model, Data]:
            model, data = guide()
            model(data.x[:8], training=True)
            torch.rand(3)
            for layer in model.layers:
                if hasattr(layer, "moving_mean"):
                    layer.moving_mean.assign(keras.ops.zeros(4))
                    layer.moving_variance.assign(keras.ops.ones(4))
            return model, data

        return make

    one, other = trained(convolutions)[0], trained(drawing(convolutions))[0]
    assert params_sha256(KerasModule(one)) == params_sha256(KerasModule(other))


def test_every_callback_is_kept_or_refused() -> None:
    refused = {kind.__name__ for kind in REFUSED}
    assert {name for name in dir(callbacks) if isinstance(getattr(callbacks, name), type)} == (
        set(KEPT_CALLBACKS.split()) | refused
    )


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"steps_per_epoch": 2}, "steps_per_epoch"),
        ({"shuffle": "batch"}, "shuffle='batch'"),
        ({"epochs": 2, "initial_epoch": 2}, "nothing to train"),
        ({"callbacks": [callbacks.BackupAndRestore("folder")]}, "BackupAndRestore"),
    ],
)
def test_what_cannot_work_is_refused_by_name(more: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        trained(lambda: (perceptron(), classes()), **more)


def test_other_data_and_models_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="was given a generator"):
        Context().run(lambda: elastic(perceptron()).fit((batch for batch in [classes()[:2]]), verbose=0))
    with pytest.raises(UsageError, match=r"a keras\.Model, and was given a Linear"):
        elastic(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="jit_compile"):
        trained(lambda: (perceptron(jit_compile=True), classes()))
    stateful = keras.Sequential([keras.Input((4, 6), batch_size=30), layers.GRU(3, stateful=True)])
    with pytest.raises(UsageError, match="gru is stateful"):
        KerasModule(stateful)
    with pytest.raises(UsageError, match=r"the layer dense\S* of the model is not built"):
        KerasModule(keras.Sequential([layers.Dense(3)]))
    with pytest.raises(UsageError, match=r"the optimizer adam\S* of the model is not built"):
        trained(lambda: gan(is_built=False))
    with pytest.raises(UsageError, match="called twice"):
        Context().run(fit_twice)


def fit_twice() -> None:
    model, data = elastic(perceptron()), classes()
    for _ in range(2):
        model.fit(data.x, data.y, verbose=0)


def test_initial_epoch_and_validation_frequency_are_those_of_keras() -> None:
    x, y, _ = classes()
    more = {"initial_epoch": 2, "epochs": 6, "validation_data": (x[:40], y[:40]), "validation_freq": 2}
    found = [trained(lambda: (perceptron(), Data(x, y)), is_elastic=each, **more)[1] for each in (False, True)]
    assert found[0].epoch == found[1].epoch == [2, 3, 4, 5]
    assert [len(each.history["val_loss"]) for each in found] == [2, 2]
    assert found[1].history["val_loss"] == pytest.approx(found[0].history["val_loss"], rel=1e-4)


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_another_backend_is_refused_by_name(backend: str) -> None:
    code = "import resile.integrations.keras"
    environment = {**os.environ, "KERAS_BACKEND": backend}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert f"Keras uses the backend {backend}" in done.stderr
    assert "KERAS_BACKEND=torch" in done.stderr


def ordinary() -> str:
    """An ordinary loop over a Keras model, by `prepare`."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    model, data = convolutions()
    module = KerasModule(model)
    optimizer = torch.optim.Adam(module.parameters())
    samples = TensorDataset(torch.tensor(data.x), torch.tensor(data.y))
    loss_fn = keras.losses.SparseCategoricalCrossentropy()
    module, optimizer, loader = prepare(module, optimizer, DataLoader(samples, batch_size=32), num_shards=4)
    for _ in loader.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_fn(targets, module(inputs)).backward()
            optimizer.step()
    result: str = loader.result.params_sha256
    return result


def test_a_keras_model_or_optimizer_that_is_given_to_prepare_is_refused_with_what_to_give() -> None:
    model, data = convolutions()
    loader = DataLoader(TensorDataset(torch.tensor(data.x), torch.tensor(data.y)), batch_size=32)
    with pytest.raises(UsageError, match=r"a Keras model .*`module = resile.integrations.keras.KerasModule\(model\)`"):
        Context().run(prepare, model, torch.optim.Adam(model.parameters()), loader)
    with pytest.raises(UsageError, match=r"Keras' Adam as optimizer: use an optimizer of torch.optim"):
        Context().run(prepare, KerasModule(model), keras.optimizers.Adam(), loader)


def test_an_ordinary_loop_over_a_keras_model_works_with_prepare(capsys: pytest.CaptureFixture[str]) -> None:
    ahead = AtBoundaries()

    def run(session: SoloSession) -> str:
        enter_session(session)
        return ordinary()

    sha = Context().run(run, ahead)
    assert "in full" not in capsys.readouterr().err
    assert all(Context().run(run, Joining(ahead.before[number])) == sha for number in (3, 7))
