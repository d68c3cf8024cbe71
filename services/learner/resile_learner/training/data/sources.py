"""Choosing where the shards of a run come from: a map-style dataset or a stream."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from resile_shared.errors import UsageError

from .batch_samplers import BatchSampler
from .batches import Position
from .fetch import Collate, checked_dataset
from .samplers import Sampler, planned
from .shard_source import DatasetShards, ShardSource
from .stream_reader import is_stream
from .stream_shards import StreamShards


def open_source(
    dataset: Any,
    *,
    batch_size: int,
    batch_range: tuple[int, int] | None,
    num_shards: int | None,
    seed: int,
    shuffle: bool,
    drop_last: bool,
    sampler: Sampler | None,
    batch_sampler: BatchSampler | None,
    collate_fn: Collate | None,
    num_workers: int,
    num_turns: int,
    is_fast: bool,
    micro_batch_size: int | None,
    position: Callable[[], Position],
) -> ShardSource:
    """Open the source of shards for a training call, whose arguments these are. Raises UsageError."""
    if micro_batch_size is not None and not is_fast:
        raise UsageError(
            f'micro_batch_size is {micro_batch_size}, and mode is "same-bits", where each shard is one forward and '
            "backward pass: choose num_shards such that a shard of the largest batch fits, and leave micro_batch_size "
            "out"
        )
    if is_stream(dataset):
        refused = {"sampler": sampler, "batch_sampler": batch_sampler, "batch_range": batch_range}
        check_stream(**refused, drop_last=drop_last, num_workers=num_workers)
        return StreamShards(
            dataset,
            batch_size=batch_size,
            num_shards=num_shards,
            seed=seed,
            collate_fn=collate_fn,
            position=position,
            is_fast=is_fast,
            micro_batch_size=micro_batch_size,
        )
    if batch_range and batch_sampler:
        raise UsageError("batch_range was given beside a batch sampler, which decides the batches: leave it out")
    plan = planned(
        len(checked_dataset(dataset, name="training")),
        batch_size,
        num_shards,
        seed=seed,
        shuffle=shuffle,
        drop_last=drop_last,
        sampler=sampler,
        batch_sampler=batch_sampler,
        largest=batch_range[1] if batch_range else None,
    )
    plan = replace(plan, micro_batch_size=micro_batch_size)
    if batch_range:
        replace(plan, batch_size=batch_range[1])  # refuses a batch that cannot be carried out later
    return DatasetShards(
        dataset,
        plan,
        collate_fn=collate_fn,
        num_workers=num_workers,
        num_turns=num_turns,
        is_fast=is_fast,
    )


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
