"""Keras' fit with all that a joiner has to be told: callbacks, the optimizer, metrics, statistics, seeds."""

import argparse
import csv
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
from keras import callbacks, layers

from resile.integrations.keras import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--guide", default="images", choices=["dense", "images", "inputs"])
parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
parser.add_argument("--kill", type=Path, help="a file; the worker that creates it kills itself")
options = parser.parse_args()

NUM, KILLED_AT, EPOCHS = 200, 12, 5
rng = np.random.default_rng(0)
keras.utils.set_random_seed(0)
y: Any
if options.guide == "dense":
    x: Any = rng.normal(size=(NUM, 6))
    y = (x.sum(1) > 0).astype("int64")
    model = keras.Sequential([keras.Input((6,)), layers.Dense(16, "relu", kernel_regularizer="l2"), layers.Dense(2)])
    optimizer: Any = keras.optimizers.Adam(1e-2, global_clipnorm=0.5, use_ema=True)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    own: list[Any] = [callbacks.ReduceLROnPlateau(patience=0, min_delta=1.0)]
    more: dict[str, Any] = {"validation_split": 0.2, "class_weight": {0: 1.0, 1: 2.0}}
elif options.guide == "images":
    x = rng.normal(size=(NUM, 6, 6, 1))
    y = (x.sum((1, 2, 3)) > 0).astype("int64")
    random = [layers.GaussianNoise(0.1), layers.Dropout(0.2), layers.Dropout(0.1, seed=3)]
    first = [keras.Input((6, 6, 1)), layers.RandomFlip(), layers.Conv2D(4, 3), layers.BatchNormalization()]
    model = keras.Sequential([*first, layers.ReLU(), *random, layers.Flatten(), layers.Dense(2, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    own = [callbacks.EarlyStopping("val_loss", mode="max", patience=3, restore_best_weights=True)]
    more = {"validation_data": (x[:50], y[:50])}
else:
    x = {"ids": rng.integers(0, 9, (NUM, 4)), "values": rng.normal(size=(NUM, 3))}
    y = {"is": x["values"][:, :1] > 0, "has": x["values"][:, 1:]}
    ids, values = keras.Input((4,), name="ids", dtype="int32"), keras.Input((3,), name="values")
    hidden = layers.Concatenate()([layers.LSTM(4)(layers.Embedding(9, 4, mask_zero=True)(ids)), values])
    outputs = {"is": layers.Dense(1, "sigmoid", name="is")(hidden), "has": layers.Dense(2, name="has")(hidden)}
    model = keras.Model([ids, values], outputs)
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 35)
    losses = {"is": "binary_crossentropy", "has": "mse"}
    model.compile(keras.optimizers.SGD(schedule, momentum=0.9), losses, metrics={"is": [keras.metrics.AUC()]})
    own = []
    more = {"sample_weight": {"is": np.arange(NUM) % 3, "has": np.ones(NUM)}}


class Counting(callbacks.Callback):
    """Counts iterations, and lets the learning rate, or the momentum, jump."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.losses: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        self.losses.append(logs["loss"])
        assert self.steps == int(self.model.optimizer.iterations.value) == len(self.losses)
        if options.kill and self.steps == KILLED_AT and not options.kill.exists():
            options.kill.touch()
            os.kill(os.getpid(), signal.SIGKILL)


counting = Counting()
log = options.folder / f"{options.guide}.csv"
checkpoint = callbacks.ModelCheckpoint(str(options.folder / f"{options.guide}.keras"), "loss", save_best_only=True)
model = elastic(model, num_shards=4, checkpoint_every=5)
held = [*own, counting, callbacks.CSVLogger(log), checkpoint]
history = model.fit(x, y, batch_size=32, epochs=EPOCHS, callbacks=held, verbose=2, **more)
assert counting.steps == model.optimizer.iterations.value == len(counting.losses), counting.steps
epochs = {int(row["epoch"]) for row in csv.DictReader(log.read_text().splitlines())}
assert epochs == set(history.epoch)
assert float(checkpoint.best) == min(history.history["loss"])
if options.guide == "images":
    assert own[0].wait == 3 or len(history.epoch) == EPOCHS
loaded = keras.saving.load_model(checkpoint.filepath)
assert len(loaded.weights) == len(model.weights)
print("history", {name: [round(value, 5) for value in values] for name, values in history.history.items()})
