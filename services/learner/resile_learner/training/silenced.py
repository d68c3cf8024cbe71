"""Modules that are silenced to see what the others compute: those that draw random numbers, or use batch statistics."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

_WITH_STATISTICS = nn.modules.batchnorm._NormBase
_DRAWING = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.MultiheadAttention, nn.RNNBase)


def draws(module: nn.Module) -> bool:
    """Whether a module draws random numbers while it trains; ``is_random`` says so of one of an adapter."""
    return isinstance(module, _DRAWING) or getattr(module, "is_random", False)


def has_statistics(module: nn.Module) -> bool:
    """Whether a module mixes rows while it trains, as is expected of it: a BatchNorm or InstanceNorm."""
    return isinstance(module, _WITH_STATISTICS)


def uses_batch_statistics(model: nn.Module) -> bool:
    """Whether a BatchNorm of ``model`` computes with the mean and the variance of the rows that it is given."""
    norms = [each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    return any(each.training or each.running_mean is None for each in norms)


@contextmanager
def silenced(modules: Iterable[nn.Module]) -> Iterator[None]:
    """In this context ``modules`` are in evaluation mode; their parts are not, unless they are listed."""
    modes = {module: module.training for module in modules}
    for module in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


BATCH_STATISTICS = (
    "BatchNorm normalizes each shard by the statistics of its own samples, on any number of workers alike, where plain "
    "PyTorch takes those of the batch: some rows have {size}. A smaller num_shards makes shards larger; GroupNorm and "
    "LayerNorm do not depend on the batch; in a loop of prepare(), a call within `with resile.training.undivided():` "
    "computes the whole batch on every worker, as plain PyTorch does"
)
