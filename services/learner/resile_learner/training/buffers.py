"""Buffers of a model (BatchNorm statistics and the like) under the fixed tree.

Every shard starts from the buffers of the last committed iteration. The changes that shards make to a floating-point
buffer are weighted and summed in the same tree as the gradients; any other buffer takes the value that the first shard
leaves in it.
"""

import torch
from torch import Tensor, nn

from .digest import RollingDigest

Deltas = dict[int, Tensor]


class Buffers:
    """The buffers of a model, numbered in the order of ``named_buffers()``."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [_place(model, name) for name, _ in model.named_buffers()]
        self._committed = [self._now(index).detach().clone() for index in range(len(self._places))]
        self._versions = [self._now(index)._version for index in range(len(self._places))]
        self._touched: set[int] = set()
        self._digest = RollingDigest(self._committed)
        self._unversioned = [key.startswith("running_") for _, key in self._places]

    def _now(self, index: int) -> Tensor:
        module, key = self._places[index]
        buffer = module._buffers[key]
        assert buffer is not None
        return buffer

    @torch.no_grad()
    def restore(self) -> None:
        """Before a shard: restore the committed values, also of what was changed after `collect`."""
        self._touched.update(index for index in range(len(self._places)) if self._has_changed(index))
        for index in self._touched:
            self._now(index).copy_(self._committed[index])
        self._note_versions(self._touched)
        self._touched.clear()

    @torch.no_grad()
    def collect(self, *, weight: float, first: bool) -> Deltas:
        """After a shard: return its weighted changes, and of the ``first`` shard the values of all other buffers."""
        changed = [index for index in range(len(self._places)) if self._has_changed(index)]
        self._touched.update(changed)
        deltas = {}
        for index in changed:
            buffer = self._now(index)
            if buffer.is_floating_point():
                deltas[index] = (buffer - self._committed[index]).mul_(weight)
            elif first:
                deltas[index] = buffer.clone()
        return deltas

    def _has_changed(self, index: int) -> bool:
        """By the tensor's version; fused normalisation kernels write running statistics without raising it."""
        buffer = self._now(index)
        if self._unversioned[index]:
            return not torch.equal(buffer, self._committed[index])
        return buffer._version != self._versions[index]

    @torch.no_grad()
    def commit(self, deltas: Deltas) -> None:
        """After the exchange: apply the summed changes of all shards."""
        self.restore()
        for index, delta in deltas.items():
            buffer = self._now(index)
            if buffer.is_floating_point():
                self._committed[index].add_(delta.to(buffer.device))
            else:
                self._committed[index].copy_(delta)
            buffer.copy_(self._committed[index])
        self._note_versions(set(deltas))

    @torch.no_grad()
    def adopt(self) -> None:
        """Make the model's current buffers the committed ones, after a state was loaded."""
        for index in range(len(self._places)):
            self._committed[index].copy_(self._now(index))
        self._touched.clear()
        self._note_versions(set(range(len(self._places))))

    @torch.no_grad()
    def adopt_changed(self) -> None:
        """Before an iteration: what the script wrote into a buffer since the last exchange is committed."""
        changed = {index for index in range(len(self._places)) if self._has_changed(index)} - self._touched
        for index in changed:
            self._committed[index].copy_(self._now(index))
        self._note_versions(changed)

    def committed(self) -> list[Tensor]:
        """Copies of the committed values."""
        return [buffer.clone() for buffer in self._committed]

    @torch.no_grad()
    def reset(self, committed: list[Tensor]) -> None:
        """Take back what was committed since `committed` returned these."""
        for index, value in enumerate(committed):
            self._committed[index].copy_(value)
            self._now(index).copy_(value)
        self._touched.clear()
        self._note_versions(set(range(len(self._places))))

    def digest(self, number: int) -> int:
        """A cheap check of the committed values before iteration ``number``: see `RollingDigest`."""
        return self._digest.at(number)

    def like(self, index: int) -> Tensor:
        """A buffer of the dtype and shape of buffer ``index``."""
        return self._committed[index]

    def _note_versions(self, indices: set[int]) -> None:
        for index in indices:
            self._versions[index] = self._now(index)._version


def add_deltas(left: Deltas, right: Deltas) -> Deltas:
    """One addition of the tree; a buffer that one side did not change adds nothing."""
    merged = dict(left)
    for index, delta in right.items():
        if index in merged and delta.is_floating_point():
            merged[index] = merged[index] + delta
        else:
            merged.setdefault(index, delta)
    return merged


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key
