"""IBM's ``FabricModel``, elastic. How its arguments map onto a run is in docs/integrations.md."""

import shutil
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from resile.training import Result
from resile.training.extend import current_session
from resile_shared.errors import UsageError

from .callbacks import DefaultLogger
from .files import ModelFiles
from .metrics import Metric, named_metrics
from .training import FabricTraining, Parts, Schedule

_OF_HARDWARE = ("worker_memory", "driver_memory", "hardware_spec", "worker_device_type", "worker_device_mem")
"""Arguments of ``train`` that ask the platform for machines."""


class FabricModel:
    """Takes what IBM's FabricModel takes, in its versions 1.2 to 4.0, and trains on any number of workers.

    ``datasets_function`` returns a map-style dataset for training and one for tests, or None. ``loss_function`` and
    each of ``metrics`` return the mean over a batch. ``lr_scheduler`` steps once an epoch. Raises UsageError for
    arguments that are not supported.
    """

    def __init__(
        self,
        model: Any,
        datasets_function: Callable[[], Any],
        loss_function: Any,
        optimizer: Any,
        metrics: Any = None,
        worker_logger_callback: Any = None,
        driver_logger_callback: Any = None,
        save_to_onnx: bool = False,
        keras_custom_objects: Any = None,
        fn_batch_collate: Callable[[list[Any]], Any] | None = None,
        *,
        lr_scheduler: Any = None,
        driver_logger: Any = None,
        worker_logger: Any = None,
        user_callback: Any = None,
        enable_onnx: bool = False,
        fn_step_train: Callable[..., Any] | None = None,
        fn_test: Callable[..., Any] | None = None,
        fn_args: Any = None,
        **more: Any,
    ) -> None:
        for name in more:
            raise UsageError(f"FabricModel does not take {name}: Resile knows no such argument of IBM's API")
        _check(model, loss_function, optimizer, keras_custom_objects)
        self._parts = Parts(
            model=model,
            datasets=datasets_function,
            loss_function=loss_function,
            optimizer=optimizer,
            metrics=_metrics(metrics),
            collate=fn_batch_collate,
            lr_scheduler=lr_scheduler,
            user_callbacks=_listed(user_callback),
            driver_logger=_first(driver_logger_callback, driver_logger) or DefaultLogger(),
            worker_logger=_first(worker_logger_callback, worker_logger),
            step_train=fn_step_train,
            test=fn_test,
            step_arguments={} if fn_args is None else fn_args,
            saves_onnx=save_to_onnx or enable_onnx,
        )
        _check_onnx(self._parts.saves_onnx)
        self._files = ModelFiles(model, optimizer)

    def train(
        self,
        epochs: int,
        batch_size: int,
        engines_number: int | None = None,
        *positional: int,
        worker_num: int | None = None,
        worker_device_num: int = 1,
        num_dataloader_threads: int | None = None,
        validation_freq: int | None = None,
        checkpoint_freq: int | None = None,
        **more: Any,
    ) -> Result:
        """Train for ``epochs``, with a global batch of ``batch_size`` samples for each of ``engines_number`` engines.

        The engines are the shards of the global batch, and the largest number of workers. Further arguments are the
        threads that read data, and after how many epochs a validation and a checkpoint follow; a fourth argument alone
        is the last of these, as in the older samples. Raises UsageError for settings that cannot work.
        """
        if len(positional) == 1:
            checkpoint_freq = positional[0] if checkpoint_freq is None else checkpoint_freq
        elif positional:
            names = ("num_dataloader_threads", "validation_freq", "checkpoint_freq")
            given = dict(zip(names, positional, strict=False))
            num_dataloader_threads = given.get("num_dataloader_threads", num_dataloader_threads)
            validation_freq = given.get("validation_freq", validation_freq)
            checkpoint_freq = given.get("checkpoint_freq", checkpoint_freq)
        _check_more(more)
        schedule = Schedule(
            epochs=_whole("epochs", epochs),
            batch_size=_whole("batch_size", batch_size),
            engines=_engines(engines_number, worker_num, worker_device_num),
            num_readers=_whole("num_dataloader_threads", num_dataloader_threads or 0, least=0),
            validation_every=_whole("validation_freq", 10 if validation_freq is None else validation_freq, least=0),
            checkpoint_every=_whole("checkpoint_freq", checkpoint_freq or 0, least=0),
        )
        return FabricTraining(self._parts, schedule, self._files).run()

    def download(self, out_dir: str = ".", **more: Any) -> None:
        """Copy the files of the trained model to ``out_dir``."""
        if current_session().view.rank == 0 and self._files.folder.is_dir():
            shutil.copytree(self._files.folder, Path(out_dir), dirs_exist_ok=True)


def _check(model: Any, loss_function: Any, optimizer: Any, keras_custom_objects: Any) -> None:
    if not isinstance(model, nn.Module) or keras_custom_objects is not None:
        raise UsageError(
            f"FabricModel was given a {type(model).__name__} and Resile trains PyTorch: give it a torch.nn.Module, and "
            "leave out keras_custom_objects"
        )
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"FabricModel was given {optimizer!r} as its optimizer: give it a torch.optim.Optimizer over the "
            "parameters of the model"
        )
    if not callable(loss_function):
        raise UsageError(f"FabricModel was given {loss_function!r} as its loss_function: give it a function")


def _check_onnx(is_wanted: bool) -> None:
    missing = [name for name in ("onnx", "onnxscript") if is_wanted and find_spec(name) is None]
    if missing:
        options = " ".join(f"--with {name}" for name in missing)
        raise UsageError(f"saving the model as ONNX needs {' and '.join(missing)}: start the script with {options}")


def _check_more(more: Mapping[str, Any]) -> None:
    for name in more:
        if name not in _OF_HARDWARE:
            raise UsageError(f"train() does not take {name}: Resile knows no such argument of IBM's API")
    if more:
        warnings.warn(
            f"{', '.join(more)}: without effect, since the pool chooses where workers run (`resile submit --group`)",
            stacklevel=3,
        )


def _engines(engines_number: int | None, worker_num: int | None, worker_device_num: int) -> int:
    if engines_number is None and worker_num is None:
        raise UsageError("train() was called without engines_number: how many engines share a global batch?")
    if engines_number is not None:
        return _whole("engines_number", engines_number)
    return _whole("worker_num", worker_num) * _whole("worker_device_num", worker_device_num)


def _whole(name: str, value: Any, *, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"train() was given {name}={value!r}: use a whole number from {least} up")
    return value


def _metrics(metrics: Any) -> dict[str, Metric]:
    return named_metrics(metrics)


def _listed(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
