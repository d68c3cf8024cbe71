"""How the batches of an ordinary loader become global batches, cut into shards."""

from resile_shared.errors import UsageError


def cut_batch(batch_size: int | None, accumulate: int | None, num_shards: int | None) -> tuple[int, int | None]:
    """The global batch and its number of shards; None: as many as usual."""
    if accumulate is None:
        return batch_size or 1, num_shards
    if batch_size is None:
        raise UsageError(
            "prepare() was given accumulate and a loader with a batch sampler of its own: let the batch sampler yield "
            "whole global batches, which are cut into num_shards"
        )
    if num_shards is not None:
        raise UsageError(
            "prepare() was given both accumulate and num_shards: accumulate makes a global batch of several batches, "
            "num_shards cuts each batch; choose one"
        )
    if accumulate < 1:
        raise UsageError(f"accumulate is {accumulate}: use 1 or more")
    return batch_size * accumulate, accumulate
