"""Gradient scalers, whose scale is part of the run's state."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def prepared_scalers(state: Mapping[str, Any], parameters: Sequence[Tensor]) -> tuple[torch.amp.GradScaler, ...]:
    """Return the scalers of ``state``, each with its scale on the parameters' device.

    A scaler makes it when it scales its first loss; without it, a member that computed no shard of its first iteration
    cannot unscale the gradients of the others.
    """
    device = next((parameter.device for parameter in parameters), torch.device("cpu"))
    scalers = tuple(value for value in state.values() if isinstance(value, torch.amp.GradScaler))
    for scaler in scalers:
        scaler.scale(torch.zeros((), device=device))
    return scalers
