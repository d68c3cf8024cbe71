"""Keras' fit, elastic: handwritten digits, with convolutions, BatchNorm, dropout, validation and early stopping.

    python examples/keras_fit.py
    resile run examples/keras_fit.py --workers 3

Both end with the same parameters, bit for bit. Lines that a script for Keras would not have are marked with `# Resile`.
"""

import os

os.environ["KERAS_BACKEND"] = "torch"  # Keras reads it when it is imported

import keras
from keras import layers
from sklearn.datasets import load_digits

from resile.integrations.keras import elastic  # Resile

digits = load_digits()
images, targets = digits.images[..., None] / 16, digits.target

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same", use_bias=False),
        layers.BatchNormalization(momentum=0.9),
        layers.ReLU(),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dropout(0.2),
        layers.Dense(10),
    ]
)
model.compile(
    optimizer=keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(1e-2, 120)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)

model = elastic(model)  # Resile
history = model.fit(
    images[:1500],
    targets[:1500],
    batch_size=64,
    epochs=5,
    validation_data=(images[1500:], targets[1500:]),
    callbacks=[keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)],
    verbose=2,
)
print(f"best validation accuracy {max(history.history['val_accuracy']):.1%}")
