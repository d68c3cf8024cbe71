"""An ordinary loop, made elastic by one line.

::

    model, optimizer, loader = resile.training.prepare(model, optimizer, loader)
    for epoch in loader.epochs(10):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()

What such a loop means is in docs/division.md; of one whose body runs for each shard, in docs/elastic-training.md.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader

from resile_shared.errors import UsageError

from .division.body_loader import BodyLoader
from .elastic_loader import ElasticLoader
from .gates import gate_method, gate_optimizer, gate_schedule
from .settings import Mode, TrainingSettings
from .watch.optimizer_watch import check_optimizers

Body = Literal["batch", "shard"]
"""What the body of a loop runs once for: each batch of the loader, or each shard that a worker computes."""


def prepare(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loader: DataLoader[Any],
    scheduler: Any = None,
    *more: Any,
    accumulate: int | None = None,
    num_shards: int | None = None,
    seed: int = 0,
    grad_scaler: torch.amp.GradScaler | None = None,
    state: Mapping[str, Any] | None = None,
    checkpoint_every: int | str | None = None,
    mode: Mode = "same-bits",
    micro_batch_size: int | None = None,
    threads: int = 1,
    recompute: bool = False,
    body: Body | None = None,
) -> tuple[Any, ...]:
    """Make an ordinary training loop elastic; returns what it was given, to be used from here on.

    The body of the loop runs once for each batch of the loader, alike on every worker, and only calls of the model are
    divided, by rows into ``num_shards`` shards (None: as for `ElasticLoop`): see docs/division.md. ``model``,
    ``optimizer`` and ``scheduler`` may be lists. With ``recompute`` each shard is computed once more for its backward
    pass, so that activations of one at a time are kept. ``state`` and all other options are those of `ElasticLoop`.

    With ``body="shard"`` the body runs once for each shard, as it does by default with ``accumulate``,
    ``micro_batch_size`` or in fast mode. The loader then yields the shards that this worker computes; with
    ``accumulate`` each of its batches is a shard, and that many shards make a global batch. In fast mode each worker's
    share of the global batch is one shard, or several of at most ``micro_batch_size`` samples (None: with
    ``accumulate`` as many as a batch of the loader has). ``loss.backward()`` of this worker's last shard exchanges the
    gradients, and only then do the steps of ``optimizer``, ``scheduler`` and ``grad_scaler`` act, on every worker.
    ``optimizer.step(closure)`` evaluates the closure on each shard; whenever the optimizer needs it again, the loader
    yields the iteration's shards once more. Each of several optimizers has its own ``backward()`` and exchange, in the
    order in which the body steps them, and the loader yields each batch once for each of them.

    Raises UsageError for what cannot work.
    """
    if more:
        raise UsageError(
            "prepare() takes one schedule, or several in a list: `model, optimizer, loader, (warmup, plateau) = "
            "prepare(model, optimizer, loader, [warmup, plateau])`; it takes one loader: use others as they are"
        )
    _check_first_call(loader)
    optimizers = _listed(optimizer)
    schedules = _listed(scheduler)
    models = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    _check_models([model] if isinstance(model, nn.Module) else model)
    check_optimizers(optimizers)
    settings = TrainingSettings(
        num_shards=num_shards,
        micro_batch_size=micro_batch_size,
        seed=seed,
        state={**_parts(schedules, grad_scaler), **(state or {})},
        checkpoint_every=checkpoint_every,
        mode=mode,
        threads=threads,
        recompute=recompute,
    )
    needs_shards = accumulate is not None or mode == "fast" or micro_batch_size is not None
    if (body or ("shard" if needs_shards else "batch")) == "batch":
        _check_body(accumulate=accumulate, mode=mode, micro_batch_size=micro_batch_size)
        whole = BodyLoader(models, optimizers, loader, settings, grad_scaler=grad_scaler)
        _is_prepared.set(True)
        return (model, optimizer, whole) if scheduler is None else (model, optimizer, whole, scheduler)
    if recompute:
        raise UsageError(
            "prepare() was given recompute, which is for a body that runs once for each batch: leave it out, and give "
            "a higher num_shards, with which a shard takes less memory"
        )
    elastic = ElasticLoader(models, optimizers, loader, settings, accumulate=accumulate, grad_scaler=grad_scaler)

    for turn, each in enumerate(optimizers):
        gate_optimizer(each, partial(elastic.may_step, turn), elastic.step_with_closure)
    for schedule in schedules:
        gate_schedule(schedule, partial(elastic.may_step_schedule, _turn_of(schedule, optimizers)))
    if grad_scaler is not None:
        for name in ("unscale_", "step", "update"):
            gate_method(grad_scaler, name, partial(elastic.may_step, 0))
    _is_prepared.set(True)
    return (model, optimizer, elastic) if scheduler is None else (model, optimizer, elastic, scheduler)


_is_prepared: ContextVar[bool] = ContextVar("resile_is_prepared", default=False)


def _check_first_call(loader: Any) -> None:
    if isinstance(loader, ElasticLoader) or _is_prepared.get():
        raise UsageError(
            "prepare() was called a second time: a script has one training call, and so one call of prepare(). Give it "
            "all models and optimizers of the loop as lists: prepare([generator, critic], [first, second], loader)"
        )


def _check_models(models: Sequence[nn.Module]) -> None:
    """Raise UsageError for a model of Keras, whose variables and seeds are no parameters and generators of PyTorch."""
    for model in models:
        if any(kind.__module__.partition(".")[0] == "keras" for kind in type(model).__mro__):
            raise UsageError(
                f"prepare() was given a Keras model ({type(model).__name__}): give it "
                "`module = resile.integrations.keras.KerasModule(model)`, with an optimizer of module.parameters(), "
                'and call the module in the loop (docs/integrations.md, "Keras")'
            )


def _check_body(*, accumulate: int | None, mode: Mode, micro_batch_size: int | None) -> None:
    """Raise UsageError for options that a body which runs once for each batch cannot have."""
    if accumulate is not None:
        raise UsageError(
            'prepare(..., body="batch") was given accumulate, which it does not need: accumulate as in a plain loop, '
            "where the optimizer steps only after every few batches"
        )
    if mode != "same-bits":
        raise UsageError('prepare(..., body="batch") was given mode, which it cannot have yet: leave it out')
    if micro_batch_size is not None:
        raise UsageError(
            'prepare(..., body="batch") was given micro_batch_size, which is for mode="fast": give a higher num_shards '
            "for parts of a batch that take less memory"
        )


def _listed(value: Any) -> list[Any]:
    """One, several or none, as a list."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _parts(schedules: Sequence[Any], grad_scaler: Any) -> dict[str, Any]:
    """The parts of the state that `prepare` knows by name."""
    named = {f"scheduler {number}" if number else "scheduler": each for number, each in enumerate(schedules)}
    return named if grad_scaler is None else {**named, "grad_scaler": grad_scaler}


def _turn_of(schedule: Any, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """The number of the optimizer whose rates ``schedule`` sets; the last one's if that is not known."""
    held = getattr(schedule, "optimizer", None)
    return next((turn for turn, each in enumerate(optimizers) if each is held), len(optimizers) - 1)
