"""Choosing where the shards of a run come from: a map-style dataset or a stream."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from resile_shared.errors import UsageError

from ..settings import TrainingSettings
from .batches import BatchPlan, Position
from .fetch import checked_dataset
from .samplers import planned
from .shard_source import DatasetShards, ShardSource
from .stream_reader import is_stream
from .stream_shards import StreamShards


def open_source(
    dataset: Any, settings: TrainingSettings, *, num_turns: int, position: Callable[[], Position]
) -> ShardSource:
    """Open the source of shards for a training call. Raises UsageError."""
    if is_stream(dataset):
        check_stream(
            sampler=settings.sampler,
            batch_sampler=settings.batch_sampler,
            batch_range=settings.batch_range,
            drop_last=settings.drop_last,
            num_workers=settings.num_workers,
        )
        return StreamShards(
            dataset,
            batch_size=settings.batch_size,
            num_shards=settings.num_shards,
            seed=settings.seed,
            collate_fn=settings.collate_fn,
            position=position,
            is_fast=settings.is_fast,
            micro_batch_size=settings.micro_batch_size,
        )
    return DatasetShards(
        dataset,
        plan_batches(dataset, settings),
        collate_fn=settings.collate_fn,
        num_workers=settings.num_workers,
        worker_init_fn=settings.worker_init_fn,
        num_turns=num_turns,
        is_fast=settings.is_fast,
    )


def plan_batches(dataset: Any, settings: TrainingSettings) -> BatchPlan:
    """Plan the batches of an epoch of a map-style dataset. Raises UsageError."""
    batch_range = settings.batch_range
    if batch_range and settings.batch_sampler:
        raise UsageError("batch_range was given beside a batch sampler, which decides the batches: leave it out")
    settings.check_batch_range()
    plan = planned(
        len(checked_dataset(dataset, name="training")),
        settings.batch_size,
        settings.num_shards,
        seed=settings.seed,
        shuffle=settings.shuffle,
        drop_last=settings.drop_last,
        sampler=settings.sampler,
        batch_sampler=settings.batch_sampler,
        largest=batch_range[1] if batch_range else None,
    )
    plan = replace(plan, micro_batch_size=settings.micro_batch_size)
    if batch_range:
        replace(plan, batch_size=batch_range[1])  # refuses a batch that cannot be carried out later
    return plan


_REMEDIES = {
    "sampler": "let the stream yield the samples in the order of training",
    "batch_sampler": "let the stream yield the samples in the order of training, and give a batch_size",
    "batch_range": "leave it out",
    "drop_last": "leave it out: the short batch at the end of an epoch has fewer shards",
    "num_workers": "set it to 0, and do in collate_fn what takes time, since it runs for a worker's own shards alone",
}


def check_stream(**settings: Any) -> None:
    """Raises UsageError for the settings of a training call that a stream cannot have."""
    for name, value in settings.items():
        if value:
            raise UsageError(f"{name} was given with a dataset that is a stream (iterable): {_REMEDIES[name]}")
