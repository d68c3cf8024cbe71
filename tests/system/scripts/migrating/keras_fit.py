"""A script for Keras, for a table of docs/migrating.md."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(256, 8))
y = (x.sum(1) > 0).astype("int64")

model = keras.Sequential([keras.Input((8,)), layers.Dense(16, activation="relu"), layers.Dropout(0.1), layers.Dense(2)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(x, y, batch_size=32, epochs=3, validation_split=0.25, verbose=2)
