"""Callbacks of scripts, and how their methods are called: in three generations of signatures."""

import inspect
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from .logs import ELog, EMetrics

_WRITTEN_TO = ("LOG_DIR", "RESULT_DIR", "JOB_STATE_DIR")


class Callback:
    """Base class of callbacks about epochs, which are called on every worker.

    ``params`` has the keys "optimizer", "epochs" and "batch_size"; ``model`` is the model.
    """

    params: dict[str, Any]
    model: Any

    def __init__(self) -> None:
        self.params = {}
        self.model = None

    def on_epoch_begin(self, epoch: int) -> None:
        """An epoch begins, counted from 0."""

    def on_epoch_end(self, epoch: int, save_model: bool = False) -> None:
        """An epoch has ended. ``save_model``: whether this worker should save the model, if the script asked for it."""


class LoggerCallback:
    """Base class of loggers. A logger may have the methods with fewer arguments, or with other names for them."""

    def on_train_begin(self) -> None:
        """Training begins."""

    def on_train_end(self) -> None:
        """Training has ended."""

    def log_train_metrics(self, metrics: Any, iteration: Any, epoch: Any, workers: Any = 0) -> None:
        """An iteration was trained."""

    def log_test_metrics(self, metrics: Any, iteration: Any, epoch: Any, workers: Any = 0) -> None:
        """A validation was completed."""


class DefaultLogger(LoggerCallback):
    """The logger for scripts without one of their own. It writes the platform's two files."""

    def log_train_metrics(self, metrics: Any, iteration: Any, epoch: Any, workers: Any = 0) -> None:
        """Append the metrics to both files."""
        with EMetrics.open() as file:
            file.record(EMetrics.TRAIN_GROUP, iteration, metrics)
        with ELog.open() as log:
            log.recordTrain("Train", iteration, iteration, metrics)

    def log_test_metrics(self, metrics: Any, iteration: Any, epoch: Any, workers: Any = 0) -> None:
        """Append the metrics to both files."""
        with EMetrics.open() as file:
            file.record(EMetrics.TEST_GROUP, iteration, metrics)
        with ELog.open() as log:
            log.recordTest("Test", metrics)


class Logged(NamedTuple):
    """The arguments of a logger. Accuracies are in percent."""

    metrics: Mapping[str, float]
    iteration: int
    """Engine batches so far: those of all workers for a driver's logger, of this worker for a worker's logger."""
    epoch: int
    worker: int
    num_workers: int


def log(logger: Any, method: str, logged: Logged) -> None:
    """Call ``method`` of ``logger``, if it exists, with the arguments of its generation of the interface.

    The first generation takes loss, accuracy, batches and the worker; the others take metrics, batches, epoch, and the
    worker or the number of workers. The names of the method's arguments tell which generation it is.
    """
    function = getattr(logger, method, None)
    if function is None:
        return
    parameters = [each for each in inspect.signature(function).parameters.values() if each.kind is not each.VAR_KEYWORD]
    is_first = bool(parameters) and "loss" in parameters[0].name.lower()
    last = logged.num_workers if len(parameters) > 3 and parameters[3].name == "workers" else logged.worker
    values: list[Any]
    if is_first:
        values = [logged.metrics["loss"], logged.metrics.get("accuracy", 0.0), logged.iteration, last]
    else:
        values = [dict(logged.metrics), logged.iteration, logged.epoch, last]
    takes_all = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    function(*(values if takes_all else values[: len(parameters)]))


class Withheld:
    """Discards what callbacks print and write into the platform's folders in `hold`, unless it is released.

    Callbacks run on every worker, since they may change the optimizer, but their output should appear once.
    """

    def __init__(self) -> None:
        self._text = io.StringIO()
        self._written: list[tuple[str, Path, bytes]] = []

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Withhold what is printed and written in this context."""
        before = {name: os.environ.get(name) for name in _WRITTEN_TO}
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(self._text):
            for name in _WRITTEN_TO:
                os.environ[name] = os.path.join(folder, name)
                os.mkdir(os.environ[name])
            try:
                yield
            finally:
                for name, value in before.items():
                    self._read(name, Path(folder, name))
                    os.environ.pop(name)
                    if value is not None:
                        os.environ[name] = value

    def release(self) -> None:
        """Print and write it after all."""
        print(self._text.getvalue(), end="")
        for name, path, content in self._written:
            target = Path(os.environ.get(name, "."), path)
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("ab") as file:
                file.write(content)

    def _read(self, name: str, folder: Path) -> None:
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        self._written += [(name, path.relative_to(folder), path.read_bytes()) for path in files]


def call_all(callbacks: list[Any], method: str, call: Callable[[Any], object]) -> None:
    """Call ``method`` of those ``callbacks`` that have it."""
    for callback in callbacks:
        function = getattr(callback, method, None)
        if function is not None:
            call(function)
