"""Copies of gradients in pinned memory of the host, for an exchange over connections."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...streams import has_streams
from ..spec import RoundSpec


class Staging:
    """Pinned memory for tensors on a device, kept as long as they live."""

    def __init__(self) -> None:
        self._hosts = WeakIdKeyDictionary()

    def stage(self, spec: RoundSpec) -> RoundSpec:
        """The same round over the copies; nothing is copied yet."""
        partials = [[self._host(partial) for partial in bucket] for bucket in spec.partials]
        return replace(spec, partials=partials, sums=[self._host(sums) for sums in spec.sums])

    def _host(self, tensor: Tensor) -> Tensor:
        if tensor not in self._hosts:
            pinned = has_streams(tensor.device)
            self._hosts[tensor] = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        return self._hosts[tensor]  # type: ignore[no-any-return]


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, and wait for all of them."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
    for device in {tensor.device for tensor in (*targets, *sources) if has_streams(tensor.device)}:
        torch.accelerator.current_stream(device).synchronize()
