"""Keras' ``fit`` on the torch backend, elastic.

::

    from resile.integrations.keras import elastic

    model = elastic(model)
    model.fit(x, y, epochs=3)
"""

import os

from resile_shared.errors import UsageError

from ..requirements import require

require("keras", minimum="3.15", below="3.16")


def _check_backend(backend: str) -> None:
    if backend != "torch":
        raise UsageError(
            f"Keras uses the backend {backend}, and Resile trains with PyTorch: set KERAS_BACKEND=torch, as by "
            '`os.environ["KERAS_BACKEND"] = "torch"` before the script imports keras'
        )


_check_backend(os.environ.setdefault("KERAS_BACKEND", "torch"))  # Keras reads it once, when it is imported

import keras  # noqa: E402

_check_backend(keras.backend.backend())

from .fit import elastic  # noqa: E402
from .module import KerasModule  # noqa: E402

__all__ = ["KerasModule", "elastic"]
