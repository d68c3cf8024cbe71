"""Which arguments, callbacks and modules of a Trainer an elastic run keeps, and why it refuses the others."""

import inspect
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch._dynamo import OptimizedModule

from resile_shared.errors import UsageError

_MORE_WORKERS = "the number of workers is the pool's: leave it out, and start the script by `resile run --workers 4`"
_BY_TIME = "workers would act at different iterations; count epochs or steps instead"
_FEWER_SAMPLES = "an epoch uses every sample once; give the loader a torch.utils.data.Subset instead"
_TAKEN: dict[str, tuple[tuple[Any, ...], str]] = {
    "accelerator": (("auto", "cpu", "gpu", "cuda"), "workers compute on a CPU or a CUDA device"),
    "strategy": (("auto", "single_device"), _MORE_WORKERS),
    "devices": (("auto", 1, "1", -1, "-1"), _MORE_WORKERS),
    "num_nodes": ((1,), _MORE_WORKERS),
    "precision": (
        (None, 32, "32", "32-true", 64, "64", "64-true", "bf16", "bf16-mixed", "bf16-true"),
        "it is scaled or quantised by a plugin whose state is not part of the run's; use precision='bf16-mixed'",
    ),
    "plugins": ((None, []), "it would replace what holds the promise of equal bits; leave it out"),
    "max_time": ((None,), f"{_BY_TIME}, as by max_steps"),
    "limit_train_batches": ((None, 1.0), _FEWER_SAMPLES),
    "overfit_batches": ((0.0,), _FEWER_SAMPLES),
    "profiler": ((None,), "it measures one worker's shards alone; `resile job` and the page show where time goes"),
    "benchmark": ((None, False), "each worker would choose kernels by itself"),
    "sync_batchnorm": (
        (False,),
        "each shard is normalised by itself, whatever the number of workers, and running statistics are exchanged "
        "anyway; leave it out",
    ),
    "reload_dataloaders_every_n_epochs": (
        (0,),
        "a worker that joins would not know the loaders of earlier epochs; choose samples with a sampler that has "
        "set_epoch",
    ),
    "model_registry": (
        (None,),
        "workers come and go while it uploads; upload after fit(), where trainer.is_global_zero",
    ),
}
"""Arguments that support only some values: those values, and why the others are refused."""

_UNFREEZES = "it freezes or unfreezes parameters while training; use parameter groups with a learning rate of 0"
_AVERAGES = (
    "it keeps a second model and puts it in place of the first; make a torch.optim.swa_utils.AveragedModel a part of "
    "the LightningModule, and update it in on_train_batch_end"
)
_TRIES = "it trains before the training call; find the value in a plain run, and write it into the script"
REFUSED_CALLBACKS: dict[type, str] = {
    callbacks.BaseFinetuning: _UNFREEZES,
    callbacks.BatchSizeFinder: _TRIES,
    callbacks.EMAWeightAveraging: _AVERAGES,
    callbacks.GradientAccumulationScheduler: "it changes the global batch by itself; use accumulate_grad_batches",
    callbacks.LearningRateFinder: _TRIES,
    callbacks.ModelPruning: "it replaces the model's parameters, and the gradients of the new ones are not exchanged",
    callbacks.SpikeDetection: "it judges the loss of one worker's shards; judge trainer.callback_metrics instead",
    callbacks.StochasticWeightAveraging: _AVERAGES,
    callbacks.ThroughputMonitor: "it measures one worker's shards alone; `resile job` and the page show the speed",
    callbacks.Timer: _BY_TIME,
    callbacks.WeightAveraging: _AVERAGES,
}
"""Callbacks of the library that are refused, and why."""

DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(pl.Trainer.__init__).parameters.items()}


def checked_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that make `Trainer` a single process. Raises UsageError, naming one that is not supported."""
    given = {**arguments}
    for name, (taken, reason) in _TAKEN.items():
        value = given.get(name, DEFAULTS[name])
        is_one_device = name == "devices" and isinstance(value, list | tuple) and len(value) == 1
        if not is_one_device and not any(value == each and type(value) is type(each) for each in taken):
            raise _refused(name, value, reason)
    if not isinstance(given.get("val_check_interval"), int | float | None):
        raise _refused("val_check_interval", given["val_check_interval"], _BY_TIME)
    given["val_check_interval"] = _in_iterations(given)
    if not isinstance(given.get("devices"), list | tuple):
        given["devices"] = 1
    given["strategy"] = "auto"
    given["deterministic"] = None  # runs are, by themselves
    return given


def check_fit(trainer: pl.Trainer, module: pl.LightningModule, ckpt_path: Any, *, is_plain: bool) -> None:
    """Raises UsageError for a module, a callback or a checkpoint with which ``trainer`` cannot train elastically."""
    if not module.automatic_optimization:
        raise UsageError(
            f"{type(module).__name__} has automatic_optimization = False, and manual optimization steps in each batch, "
            "of which a worker has only some: return one loss from training_step and let the trainer step, or, for "
            "several optimizers as in a GAN, write the loop with resile.training.prepare([critic, generator], "
            "[first, second], loader)"
        )
    if isinstance(module, OptimizedModule):
        raise UsageError(
            "the module was compiled, and each worker would choose kernels by itself: leave torch.compile out"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise UsageError("training_step takes a dataloader_iter, which reads batches by itself: take a batch instead")
    check_callbacks(trainer)
    if trainer.max_epochs == -1 and trainer.max_steps == -1:
        raise UsageError("max_epochs is -1 without max_steps, and a run needs an end: set one of them")
    _check_checkpoint(ckpt_path, is_plain=is_plain)


def check_callbacks(trainer: pl.Trainer) -> None:
    """Raises UsageError for a callback that is not supported."""
    for callback in trainer.callbacks:
        reason = next((REFUSED_CALLBACKS[kind] for kind in REFUSED_CALLBACKS if isinstance(callback, kind)), None)
        if reason:
            raise UsageError(f"ElasticTrainer does not take the callback {type(callback).__name__}: {reason}")
        if getattr(callback, "_train_time_interval", None) is not None:
            raise UsageError(
                f"ElasticTrainer does not take {type(callback).__name__}(train_time_interval=...): {_BY_TIME}, as by "
                "every_n_train_steps. Resile's own checkpoints may follow the time: checkpoint_every='5 min'"
            )


def _check_checkpoint(ckpt_path: Any, *, is_plain: bool) -> None:
    if ckpt_path is None:
        return
    if ckpt_path != "last":
        raise UsageError(
            f"ckpt_path is {ckpt_path!r}, and a job resumes from Resile's own checkpoints, which needs no argument: "
            "`resile run train.py --resume`. To begin with the weights of a file, use "
            "LightningModule.load_from_checkpoint"
        )
    if is_plain:
        raise UsageError(
            "ckpt_path='last' in a plain run, which stores no checkpoints of Resile, would start over: start it with "
            "`resile run train.py --resume`"
        )


def _in_iterations(given: Mapping[str, Any]) -> Any:
    """The val_check_interval, counted in global batches if it counts batches."""
    interval, accumulated = given.get("val_check_interval"), given.get("accumulate_grad_batches", 1)
    if type(interval) is not int or accumulated == 1:
        return interval
    if interval % accumulated:
        raise _refused(
            "val_check_interval", interval, f"choose a multiple of accumulate_grad_batches, which is {accumulated}"
        )
    return interval // accumulated


def _refused(name: str, value: Any, reason: str) -> UsageError:
    return UsageError(f"ElasticTrainer does not take {name}={value!r}: {reason}")
