"""Which callbacks run on which workers, and which are refused."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
from keras import callbacks

from resile.training.extend import current_session
from resile_shared.errors import UsageError

REFUSED: dict[type, str] = {
    callbacks.BackupAndRestore: "Resile stores checkpoints by itself (checkpoint_every), and a job resumes from them "
    "with `resile run train.py --resume`; leave it out",
    callbacks.OrbaxCheckpoint: "it writes from all processes together; use ModelCheckpoint",
}
"""Callbacks of the library that are refused, and why."""
WRITING = (callbacks.CSVLogger, callbacks.ProgbarLogger, callbacks.RemoteMonitor, callbacks.TensorBoard)
"""Callbacks that only write, which the worker with the lowest rank alone calls."""
_HOOKS = [name for name in dir(callbacks.Callback) if name.startswith("on_")]
_SAVES = ("save", "save_weights", "export")


def is_lowest_rank() -> bool:
    """Whether this worker is, at the moment, the one that prints and writes files."""
    return current_session().view.rank == 0


def checked_callbacks(given: Any, *, shows_progress: bool) -> list[callbacks.Callback]:
    """Return callbacks as `fit` calls them, those that only write on one worker. Raises UsageError."""
    held = given.callbacks if isinstance(given, callbacks.CallbackList) else given or []
    found = list(held) if isinstance(held, Sequence) else [held]
    if shows_progress and not any(isinstance(each, callbacks.ProgbarLogger) for each in found):
        found.append(callbacks.ProgbarLogger())
    for each in found:
        reason = next((REFUSED[kind] for kind in REFUSED if isinstance(each, kind)), None)
        if reason:
            raise UsageError(f"fit() does not take the callback {type(each).__name__}: {reason}")
    return [OnLowestRank(each) if isinstance(each, WRITING) else each for each in found]


class OnLowestRank(callbacks.Callback):
    """Calls ``inner`` on the worker with the lowest rank. Another one that gets it goes on in the same file."""

    def __init__(self, inner: callbacks.Callback) -> None:
        super().__init__()
        self._inner = inner
        self._is_open = False
        for name in _HOOKS:
            setattr(self, name, partial(self._call, name))

    def set_model(self, model: Any) -> None:
        """See `Callback`."""
        self._inner.set_model(model)

    def set_params(self, params: Any) -> None:
        """See `Callback`."""
        self._inner.set_params(params)

    def continue_file(self) -> None:
        """Another worker may have begun to write."""
        if isinstance(self._inner, callbacks.CSVLogger):
            self._inner.append = True

    def _call(self, name: str, *args: Any, **more: Any) -> None:
        if not is_lowest_rank():
            return
        if not self._is_open and name != "on_train_begin":
            self.continue_file()
            self._inner.on_train_begin()
        self._is_open = name != "on_train_end"
        getattr(self._inner, name)(*args, **more)


def continue_files(held: callbacks.CallbackList) -> None:
    """The run has begun before: go on in the files of that time."""
    for each in held.callbacks:
        if isinstance(each, OnLowestRank):
            each.continue_file()


def save_on_lowest_rank(model: keras.Model) -> None:
    """From now on ``model`` saves itself on the worker with the lowest rank alone, as callbacks and scripts let it."""

    def guarded(save: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **more: save(*args, **more) if is_lowest_rank() else None

    for name in _SAVES:
        vars(model)[name] = guarded(getattr(model, name))
