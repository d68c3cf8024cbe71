"""Which arguments of a Trainer an elastic run keeps, and why it refuses the others."""

from typing import Any

from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from resile_shared.errors import UsageError

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")

_WORKERS_SHARE = "workers of Resile hold whole models and share each batch"
_REFUSED = {
    "deepspeed": _WORKERS_SHARE,
    "fsdp": _WORKERS_SHARE,
    "fsdp_config": _WORKERS_SHARE,
    "parallelism_config": _WORKERS_SHARE,
    "auto_find_batch_size": "it would change the batch, and with it the bits, by the memory of one worker; lower "
    "per_device_train_batch_size, or raise num_shards, so that a worker computes fewer samples at a time",
    "fp16": "its scale is not part of the run's state; use bf16=True",
    "fp16_full_eval": "it casts the parameters in place; use bf16=True, which leaves them alone",
    "bf16_full_eval": "it casts the parameters in place; use bf16=True, which leaves them alone",
    "torch_compile": "each worker would compile, and choose kernels, by itself",
    "torch_compile_backend": "each worker would compile, and choose kernels, by itself",
    "torch_compile_mode": "each worker would compile, and choose kernels, by itself",
    "use_liger_kernel": "it was never tried here, and nothing says that its kernels are deterministic",
    "full_determinism": "it makes operations fail that have no deterministic form, and a run marks itself instead; "
    "leave it out: runs are deterministic already",
    "enable_jit_checkpoint": "Resile stores a checkpoint by itself when a job is paused or moved",
    "push_to_hub": "workers come and go while it uploads; call trainer.model.push_to_hub() after the training call, "
    "where trainer.is_world_process_zero()",
    "save_on_each_node": "checkpoint folders are written by one worker",
    "ignore_data_skip": "a resumed run continues at exactly the sample where it stopped",
    "skip_memory_metrics": "each worker would report its own memory as that of the run",
    "debug": "its hooks look at one worker's shards alone",
}
"""Arguments that must keep their defaults, and why."""

_DETERMINING = (
    "per_device_train_batch_size",
    "num_train_epochs",
    "max_steps",
    "learning_rate",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "optim",
    "optim_args",
    "optim_target_modules",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "gradient_accumulation_steps",
    "max_grad_norm",
    "label_smoothing_factor",
    "bf16",
    "activation_checkpointing",
    "neftune_noise_alpha",
    "eval_strategy",
    "eval_steps",
    "eval_delay",
    "load_best_model_at_end",
    "metric_for_best_model",
    "greater_is_better",
    "dataloader_drop_last",
    "label_names",
    "train_sampling_strategy",
)


def check_arguments(args: TrainingArguments) -> None:
    """Raises UsageError, naming the argument, for one that an elastic run cannot keep."""
    defaults = {name: field.default for name, field in TrainingArguments.__dataclass_fields__.items()}
    for name, reason in _REFUSED.items():
        value = getattr(args, name, None)
        if value != defaults.get(name) and (value or defaults.get(name)):
            raise _refused(name, value, reason)
    if args.world_size > 1:
        raise UsageError(
            "the script was started by torchrun or accelerate launch, and each of its processes would train alone: "
            "start it with `resile run train.py --workers N`"
        )
    if str(args.optim.value) not in OPTIMIZERS:
        raise _refused(
            "optim",
            args.optim.value,
            f"known to keep the bits are {', '.join(OPTIMIZERS)}; pass another one to the trainer, as "
            "optimizers=(optimizer, None)",
        )
    if args.train_sampling_strategy == "batch_rebalance":
        raise _refused("train_sampling_strategy", "batch_rebalance", "it makes whole batches, which shards cannot cut")
    given, usual = args.accelerator_config.to_dict(), AcceleratorConfig().to_dict()
    for name in sorted(given.keys() - {"non_blocking"}):
        if given[name] != usual.get(name):
            raise _refused(f"accelerator_config[{name!r}]", given[name], _WORKERS_SHARE)


def determining(args: TrainingArguments) -> dict[str, str]:
    """The arguments on which the bits depend, as text by name: they have to be equal on all workers."""
    return {f"args.{name}": str(getattr(args, name, None)) for name in _DETERMINING}


def _refused(name: str, value: Any, reason: str) -> UsageError:
    return UsageError(f"ElasticTrainer does not take {name}={value!r}: {reason}")
