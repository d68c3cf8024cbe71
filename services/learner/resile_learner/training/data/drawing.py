"""Lets a sampler draw the same epoch on every worker."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..seeds import seeded


@contextmanager
def drawing(sampler: Any, seed: int, epoch: int) -> Iterator[None]:
    """In this context ``sampler`` and those that it draws from yield ``epoch``, with generators seeded by ``seed``."""
    with seeded(seed):
        for each in _nested(sampler):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
            if isinstance(getattr(each, "generator", None), torch.Generator):
                each.generator.manual_seed(seed)
        yield


def _nested(sampler: Any) -> Iterator[Any]:
    yield sampler
    for value in getattr(sampler, "__dict__", {}).values():
        if isinstance(value, torch.utils.data.Sampler) and value is not sampler:
            yield from _nested(value)
