"""The progress of a Trainer, beside model, optimizer and schedules: part of the run's state, for workers that join."""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from ..callback_state import CallbackState, plain_attributes
from .metric_states import MetricStates

if TYPE_CHECKING:
    from .trainer import ElasticTrainer

_OF_MODULES = set(vars(pl.LightningModule())) | {"_hparams", "_hparams_initial", "_hparams_name"}
_OF_DATA_MODULES = set(vars(pl.LightningDataModule())) | {"_hparams", "_hparams_initial", "_hparams_name"}
_LAST_SAVED = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics", "_first_loop_iter", "_current_fx")
_OPTIONS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx", "metric_attribute")


class FitProgress:
    """The state of ``trainer``, its callbacks, its module and its data module, as plain values and tensors.

    It holds what the state methods of callbacks and modules return, and for those of the script all plain attributes
    that changed since training began here: what on_train_start notes, such as the time, stays each worker's own. What
    is received before training has begun is given to them in `begin`, after on_train_start.
    """

    may_differ = True
    """Plain values may differ between workers: callbacks may have attributes of one worker, such as a time."""

    def __init__(self, trainer: "ElasticTrainer", metrics: MetricStates) -> None:
        self.begun = -1
        """The newest iteration whose first hooks have run."""
        self.epoch = -1
        """The epoch of the iteration ``begun``."""
        self._trainer = trainer
        self._metrics = metrics
        self._owners = CallbackState(self._find_owners, attributes=_own_attributes)
        self._received: dict[str, Any] = {}

    @property
    def has_begun(self) -> bool:
        """Whether this worker has begun to train."""
        return self._owners.has_begun

    def begin(self) -> None:
        """Training begins here: callbacks and modules take over what was received."""
        self._owners.begin()
        self._load_methods()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a joiner needs."""
        trainer = self._trainer
        connector = trainer._logger_connector
        return {
            "loops": trainer.fit_loop.state_dict(),
            "begun": (self.begun, self.epoch, trainer.should_stop, trainer.fit_loop.epoch_loop.val_loop._has_run),
            "logged": {name: copy.copy(getattr(connector, name)) for name in _METRICS},
            "results": [_stored(metric) for metric in trainer.fit_loop.epoch_loop._results.values()],
            "validated": dict(trainer.fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader),
            "metrics": self._metrics.state_dict(),
            "versions": [logger.version for logger in trainer.loggers if _has_version(logger)],
            "attributes": self._owners.changed(),
            "methods": self._method_states() if self.has_begun else {},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned elsewhere."""
        trainer = self._trainer
        _load_loop(trainer.fit_loop, state_dict["loops"])
        val_loop = trainer.fit_loop.epoch_loop.val_loop
        self.begun, self.epoch, trainer.should_stop, val_loop._has_run = state_dict["begun"]
        val_loop._seen_batches_per_dataloader.update(state_dict["validated"])
        for name, value in state_dict["logged"].items():
            setattr(trainer._logger_connector, name, value)
        self._metrics.load_state_dict(state_dict["metrics"])
        trainer.fit_loop.epoch_loop._results.clear()
        for stored in state_dict["results"]:
            _restore_result(trainer, stored)
        loggers = [logger for logger in trainer.loggers if _has_version(logger)]
        for logger, version in zip(loggers, state_dict["versions"], strict=True):
            logger._version = version
        self._owners.load(state_dict["attributes"])
        self._received = state_dict["methods"]
        if self.has_begun:
            self._load_methods()

    def _find_owners(self) -> list[Any]:
        """The objects that may have attributes of the script."""
        trainer = self._trainer
        data = [] if trainer.datamodule is None else [trainer.datamodule]
        return [trainer.lightning_module, *data, *trainer.callbacks]

    def _method_states(self) -> dict[str, Any]:
        """What the state methods of callbacks, module and data module return."""
        trainer = self._trainer
        data = trainer.datamodule
        return {
            "callbacks": [_callback_state(callback) for callback in trainer.callbacks],
            "module": self._module_state(),
            "data": {} if data is None else call._call_lightning_datamodule_hook(trainer, "state_dict"),
        }

    def _load_methods(self) -> None:
        if not self._received:
            return
        trainer, received = self._trainer, self._received
        for callback, state in zip(trainer.callbacks, received["callbacks"], strict=True):
            _load_callback(callback, state)
        if received["module"]:
            checkpoint = {**self._checkpoint(), **received["module"]}
            call._call_lightning_module_hook(trainer, "on_load_checkpoint", checkpoint)
        if received["data"]:
            call._call_lightning_datamodule_hook(trainer, "load_state_dict", received["data"])

    def _module_state(self) -> dict[str, Any]:
        """What on_save_checkpoint of the module adds to a checkpoint."""
        if not is_overridden("on_save_checkpoint", self._trainer.lightning_module):
            return {}
        checkpoint = self._checkpoint()
        usual = set(checkpoint)
        call._call_lightning_module_hook(self._trainer, "on_save_checkpoint", checkpoint)
        return {name: value for name, value in checkpoint.items() if name not in usual}

    def _checkpoint(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "state_dict": trainer.lightning_module.state_dict(),
        }


def _own_attributes(owner: Any) -> dict[str, Any]:
    """Plain attributes that a script has given ``owner``; the library's own callbacks have state methods."""
    if type(owner).__module__.split(".")[0] in ("lightning", "resile"):
        return {}
    attributes = plain_attributes(owner)
    if isinstance(owner, pl.LightningModule | pl.LightningDataModule):
        usual = _OF_MODULES if isinstance(owner, pl.LightningModule) else _OF_DATA_MODULES
        return {name: value for name, value in attributes.items() if name not in usual}
    if isinstance(owner, ModelCheckpoint | EarlyStopping):
        return {name: value for name, value in attributes.items() if name not in owner.state_dict()}
    return attributes


def _callback_state(callback: pl.Callback) -> dict[str, Any]:
    state = {"state": callback.state_dict()}
    if isinstance(callback, ModelCheckpoint):
        state["last"] = {name: getattr(callback, name) for name in _LAST_SAVED}
    return state


def _load_callback(callback: pl.Callback, state: Mapping[str, Any]) -> None:
    if isinstance(callback, ModelCheckpoint):
        callback.dirpath = state["state"]["dirpath"]  # of the worker that has written files so far
        callback.current_score = state["state"]["current_score"]
        for name, value in state["last"].items():
            setattr(callback, name, value)
    if state["state"]:
        callback.load_state_dict(copy.deepcopy(state["state"]))


def _load_loop(loop: _Loop, state: dict[str, Any], prefix: str = "") -> None:
    """Like `_Loop.load_state_dict`, but nothing is reset: the next iteration continues where the run is."""
    loop._load_from_state_dict(state, prefix)
    for name, value in vars(loop).items():
        if isinstance(value, _Loop):
            _load_loop(value, state, f"{prefix}{name}.")


def _stored(metric: _ResultMetric) -> dict[str, Any]:
    """A logged value, or the name of a logged metric, with what has been accumulated since the epoch began."""
    options = {name: getattr(metric.meta, name) for name in _OPTIONS}
    stored = {"options": options, "reduction": metric.meta.reduce_fx.__name__, "has_reset": metric.has_reset}
    if metric.is_tensor:
        stored["tensors"] = {name: getattr(metric, name) for name in (*metric._defaults, "_forward_cache")}
    return stored


def _restore_result(trainer: "ElasticTrainer", stored: Mapping[str, Any]) -> None:
    results: _ResultCollection = trainer.fit_loop.epoch_loop._results
    options = dict(stored["options"])
    tensors = stored.get("tensors")
    path = options["metric_attribute"]
    value = Tensor([0.0])[0] if tensors is not None else trainer.lightning_module.get_submodule(path)
    key = f"{options['fx']}.{options['name']}"
    more = {"reduce_fx": stored["reduction"], "sync_dist_fn": trainer.strategy.reduce, "batch_size": 1}
    results.log(options.pop("fx"), options.pop("name"), value, **options, **more)
    for name, tensor in (tensors or {}).items():
        setattr(results[key], name, tensor)
    results[key].has_reset = stored["has_reset"]


def _has_version(logger: Any) -> bool:
    return isinstance(logger, TensorBoardLogger | CSVLogger)
