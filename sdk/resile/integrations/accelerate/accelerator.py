"""An Accelerator whose `prepare` is that of Resile: its loop is an ordinary loop.

What each of its methods becomes is in docs/integrations.md.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import accelerate
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader

from resile.training import ElasticLoader
from resile.training import prepare as prepare_loop
from resile_shared.errors import UsageError

_KEPT = ("device_placement", "cpu", "step_scheduler_with_optimizer", "project_dir", "project_config")
"""Further arguments of an Accelerator that mean the same here, or nothing to a single process."""
_INSTEAD = {
    "no_sync": "gradients are exchanged once an iteration by themselves: leave it out",
    "join_uneven_inputs": "workers share each batch: leave it out",
    "save_state": "Resile stores checkpoints by itself: see checkpoint_every",
    "load_state": "a job resumes from Resile's checkpoints by itself: leave it out",
    "skip_first_batches": "a resumed run continues at the batch where it stopped: leave it out",
    "set_trigger": "call loader.stop() on all workers, by what is equal on all of them",
    "check_trigger": "call loader.stop() on all workers, by what is equal on all of them",
    "init_trackers": "write where accelerator.is_main_process, once training has begun",
    "log": "write where accelerator.is_main_process, once training has begun",
}
"""Methods that are refused, and what to do instead."""


class PreparedLoader:
    """The training loader that `Accelerator.prepare` returns: an `ElasticLoader` whose batches are on the device."""

    def __init__(self, loader: ElasticLoader, device: torch.device) -> None:
        self._loader = loader
        self._device = device
        self.is_in_batch = False
        """Whether the script is in the body of its loop over this loader."""
        self._has_begun = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        try:
            for batch in self._loader:
                self.is_in_batch = True
                yield send_to_device(batch, self._device)
        finally:
            self.is_in_batch = False

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """See `ElasticLoader.epochs`."""
        for epoch in self._loader.epochs(num_epochs):
            self._has_begun = True
            yield epoch
        self._has_begun = True  # a worker that joins when the last epoch is over has trained none

    @property
    def has_shards(self) -> bool:
        """Whether the body of the loop gets the shards of this worker, and not whole batches."""
        return isinstance(self._loader, ElasticLoader)

    @property
    def rank(self) -> int:
        """0 on the worker that prints and writes files at the moment, and before training on all."""
        return int(self._has_begun and not self._loader.is_lowest_rank)


class Accelerator(accelerate.Accelerator):
    """Takes the place of accelerate.Accelerator in a script with one model, one optimizer and one training loader.

    With ``gradient_accumulation_steps`` more than one, each batch of the loader is a shard, and that many shards make a
    global batch; else the loader's batch is the global batch, cut into ``num_shards``. ``seed``, ``checkpoint_every``,
    ``mode``, ``micro_batch_size`` and ``threads`` are those of `resile.training.prepare`. Raises UsageError for
    arguments that are not supported.
    """

    def __init__(
        self,
        *,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        num_shards: int | None = None,
        seed: int = 0,
        checkpoint_every: int | str | None = None,
        mode: str = "same-bits",
        micro_batch_size: int | None = None,
        threads: int = 1,
        **more: Any,
    ) -> None:
        for name in more.keys() - set(_KEPT):
            raise UsageError(
                f"Resile's Accelerator does not take {name}: workers hold whole models and share each batch, and see "
                "no other process"
            )
        if mixed_precision not in (None, "no", "bf16"):
            raise UsageError(f"Resile's Accelerator does not take mixed_precision={mixed_precision!r}: use 'bf16'")
        self._loader: PreparedLoader | None = None
        super().__init__(mixed_precision=mixed_precision, **more)
        if self.num_processes > 1:
            raise UsageError(
                "the script was started by torchrun or accelerate launch, and each of its processes would train "
                "alone: start it with `resile run train.py --workers N`"
            )
        self._accumulate = gradient_accumulation_steps
        self._options: dict[str, Any] = {
            "num_shards": num_shards,
            "seed": seed,
            "checkpoint_every": checkpoint_every,
            "mode": mode,
            "micro_batch_size": micro_batch_size,
            "threads": threads,
        }
        self._registered: dict[str, Any] = {}

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """Make the loop elastic; returns what it was given, in that order.

        The call that has an optimizer has the model and the training loader, which is the first one, and the schedule.
        Other loaders are read whole by every worker. Raises UsageError for anything else.
        """
        if not any(isinstance(each, torch.optim.Optimizer) for each in objects):
            result = tuple(self._prepare_other(each) for each in objects)
        else:
            result = self._prepare_training(objects)
        return result if len(result) > 1 else result[0]

    def _prepare_training(self, objects: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._loader is not None:
            raise UsageError("accelerator.prepare() was given a second optimizer: a run has one")
        found = [_only(objects, kind, name) for kind, name in _PARTS]
        schedule = next((each for each in objects if _is_schedule(each)), None)
        model, optimizer, loader = found
        super().prepare_model(model)
        accumulate = {"accumulate": self._accumulate} if self._accumulate > 1 else {}
        more: dict[str, Any] = {**self._options, **accumulate, "state": self._registered}
        prepared = prepare_loop(model, optimizer, loader, schedule, **more)
        self._loader = PreparedLoader(prepared[2], self.device)

        def prepared_form(each: Any) -> Any:
            if each is loader:
                return self._loader
            return each if any(each is part for part in (model, optimizer, schedule)) else self._prepare_other(each)

        return tuple(map(prepared_form, objects))

    def _prepare_other(self, each: Any) -> Any:
        if isinstance(each, DataLoader):
            return super().prepare_data_loader(each)
        if isinstance(each, nn.Module):
            raise UsageError(
                "accelerator.prepare() was given a model without its optimizer and training loader: give it all of "
                "them in one call; move a model that does not learn with model.to(accelerator.device)"
            )
        if _is_schedule(each):
            raise UsageError(
                "accelerator.prepare() was given a schedule without its optimizer: give it model, optimizer, loader "
                "and schedule in one call"
            )
        return each

    def backward(self, loss: Tensor, **more: Any) -> None:
        """Compute the gradients of a batch from its mean loss, which is not divided by the accumulated batches."""
        if more:
            raise UsageError(f"accelerator.backward() was called with {', '.join(more)}: call it on the loss alone")
        loss.backward()

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Nothing to do: gradients are accumulated over the shards of an iteration."""
        yield

    @property
    def sync_gradients(self) -> bool:
        """Whether the gradients are those of a whole global batch; outside of the loop over batches, True."""
        return self._loader is None or not self._loader.is_in_batch or self._loader.sync_gradients

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Make objects with state_dict and load_state_dict part of the run's state. Before `prepare`."""
        if self._loader is not None:
            raise UsageError("register_for_checkpointing() was called after prepare(): call it before")
        for each in objects:
            self._registered[f"registered {len(self._registered)}"] = each

    def gather(self, tensor: Any) -> Any:
        """Return ``tensor``: outside of the training loop every worker has computed all of it."""
        self._check_outside("gather")
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return ``input_data``: outside of the training loop every worker has computed all of it."""
        self._check_outside("gather_for_metrics")
        return input_data

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return ``tensor`` times ``scale``: outside of the training loop every worker has computed all of it."""
        self._check_outside("reduce")
        return tensor * scale

    def wait_for_everyone(self) -> None:
        """Nothing to do: workers wait for each other in the exchange alone."""

    @property
    def process_index(self) -> int:
        """0 on the worker that prints and writes files at the moment; before training, on all."""
        rank = 0 if self._loader is None else self._loader.rank
        for state in (PartialState._shared_state, AcceleratorState._shared_state):
            state["process_index"] = state["local_process_index"] = rank
        return rank

    @property
    def local_process_index(self) -> int:
        """The same as `process_index`."""
        return self.process_index

    @property
    def is_main_process(self) -> bool:
        """Whether this worker is, at the moment, the one that prints and writes files; before training, all are."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """The same as `is_main_process`."""
        return self.is_main_process

    @property
    def is_last_process(self) -> bool:
        """The same as `is_main_process`."""
        return self.is_main_process

    def print(self, *values: Any, **more: Any) -> None:
        """Print on the worker that prints and writes files at the moment."""
        if self.is_main_process:
            print(*values, **more)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save on the worker that prints and writes files at the moment."""
        if self.is_main_process:
            super().save(obj, f, safe_serialization)

    def save_model(self, *arguments: Any, **more: Any) -> None:
        """Save on the worker that prints and writes files at the moment."""
        if self.is_main_process:
            super().save_model(*arguments, **more)

    def __getattribute__(self, name: str) -> Any:
        if name in _INSTEAD:
            raise UsageError(f"accelerator.{name}() does not work in an elastic run: {_INSTEAD[name]}")
        return super().__getattribute__(name)

    def _check_outside(self, method: str) -> None:
        if self._loader is not None and self._loader.is_in_batch and self._loader.has_shards:
            raise UsageError(
                f"accelerator.{method}() was called in the loop over the training batches, where a worker has only its "
                "own shards: loader.loss is the loss of the whole batch, once accelerator.sync_gradients"
            )


_PARTS: tuple[tuple[type, str], ...] = (
    (nn.Module, "model"),
    (torch.optim.Optimizer, "optimizer"),
    (DataLoader, "loader"),
)


def _only(objects: tuple[Any, ...], kind: type, name: str) -> Any:
    """The one object of ``kind``; of loaders, the first."""
    found = [each for each in objects if isinstance(each, kind)]
    if not found or (len(found) > 1 and kind is not DataLoader):
        raise UsageError(
            f"accelerator.prepare() was given {len(found)} objects of the kind {name} together with an optimizer: give "
            "it one model, its optimizer, its training loader, and its schedule if there is one, in one call"
        )
    return found[0]


def _is_schedule(each: Any) -> bool:
    is_other = isinstance(each, nn.Module | torch.optim.Optimizer | DataLoader)
    return not is_other and hasattr(each, "step") and hasattr(each, "state_dict")
