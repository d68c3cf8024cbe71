"""Buffers of a model (BatchNorm statistics and the like) under the fixed tree.

Every shard starts from the buffers of the last committed iteration. The changes that shards make to a floating-point
buffer are weighted and summed in the same tree as the gradients; any other buffer takes the value that the first shard
leaves in it.

Running statistics change in every shard, and a device is not waited for to find that out: they travel in buckets, as
gradients do. What changes in other buffers, which is rarely anything, travels in the headers.
"""

import torch
from torch import Tensor, nn

from .digest import RollingDigest
from .slots import LeafStep, LocalPlan, Slots

Deltas = dict[int, Tensor]


class Buffers:
    """The buffers of a model, numbered in the order of ``named_buffers()``."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [_place(model, name) for name, _ in model.named_buffers()]
        self._committed = [self._now(index).detach().clone() for index in range(len(self._places))]
        self._versions = [self._now(index)._version for index in range(len(self._places))]
        self._touched: set[int] = set()
        self._digest = RollingDigest(self._committed)
        self._statistics = [index for index in range(len(self._places)) if self._is_statistic(index)]
        self._others = [index for index in range(len(self._places)) if index not in self._statistics]
        self._slots = Slots([self._committed[index] for index in self._statistics])
        self._is_shard_open = False
        """Whether running statistics may be those of a shard."""

    def _now(self, index: int) -> Tensor:
        module, key = self._places[index]
        buffer = module._buffers[key]
        assert buffer is not None
        return buffer

    def _is_statistic(self, index: int) -> bool:
        return self._places[index][1].startswith("running_") and self._now(index).is_floating_point()

    def begin(self, plan: LocalPlan) -> None:
        """Begin an iteration in which this worker folds its shards by ``plan``."""
        self._slots.reserve(plan)

    def partials(self, plan: LocalPlan) -> list[list[Tensor]]:
        """[bucket][piece]: flat tensors with this worker's partial sums of running statistics, after its last shard."""
        return self._slots.partials(plan)

    @property
    def sums(self) -> list[Tensor]:
        """[bucket]: the flat tensors into which an exchange writes the sums for `commit`."""
        return self._slots.sums

    @torch.no_grad()
    def restore(self) -> None:
        """Before a shard: restore the committed values, also of what was changed after `collect`."""
        self._touched.update(index for index in self._others if self._has_changed(index))
        for index in self._touched:
            self._now(index).copy_(self._committed[index])
        self._note_versions(self._touched)
        self._touched.clear()
        _copy_all(*self._of_statistics())
        self._is_shard_open = False

    @torch.no_grad()
    def collect(self, *, weight: float, first: bool, step: LeafStep | None) -> Deltas:
        """After a shard: fold its weighted changes to running statistics by ``step``; None: they count for nothing.

        Returns its weighted changes to other buffers, and of the ``first`` shard the values of those that are no
        floating-point ones.
        """
        self._is_shard_open = True
        if step and self._statistics:
            now, committed = self._of_statistics()
            changes = torch._foreach_sub(now, committed)
            torch._foreach_mul_(changes, weight)
            for number, bucket in enumerate(self._slots.buckets):
                self._slots.fold(number, step, {index: changes[index] for index in bucket.members})
        changed = [index for index in self._others if self._has_changed(index)]
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
        return self._now(index)._version != self._versions[index]

    @torch.no_grad()
    def commit(self, deltas: Deltas) -> None:
        """After the exchange: apply the summed changes of all shards, those in `sums` and ``deltas``."""
        self.restore()
        if self._statistics:
            now, committed = self._of_statistics()
            torch._foreach_add_(committed, self._slots.sum_views)
            _copy_all(now, committed)
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
        self._forget_shard()

    @torch.no_grad()
    def adopt_changed(self) -> None:
        """Before an iteration: what the script wrote into a buffer since the last exchange is committed."""
        changed = {index for index in self._others if self._has_changed(index)} - self._touched
        for index in changed:
            self._committed[index].copy_(self._now(index))
        self._note_versions(changed)
        if not self._is_shard_open:
            now, committed = self._of_statistics()
            _copy_all(committed, now)

    def committed(self) -> list[Tensor]:
        """Copies of the committed values."""
        return [buffer.clone() for buffer in self._committed]

    @torch.no_grad()
    def reset(self, committed: list[Tensor]) -> None:
        """Take back what was committed since `committed` returned these."""
        for index, value in enumerate(committed):
            self._committed[index].copy_(value)
            self._now(index).copy_(value)
        self._forget_shard()

    def digest(self, number: int) -> int:
        """A cheap check of the committed values before iteration ``number``: see `RollingDigest`."""
        return self._digest.at(number)

    def like(self, index: int) -> Tensor:
        """A buffer of the dtype and shape of buffer ``index``."""
        return self._committed[index]

    def _of_statistics(self) -> tuple[list[Tensor], list[Tensor]]:
        """The running statistics: those of the model, and the committed ones."""
        now = [self._now(index) for index in self._statistics]
        return now, [self._committed[index] for index in self._statistics]

    def _forget_shard(self) -> None:
        self._touched.clear()
        self._note_versions(set(range(len(self._places))))
        self._is_shard_open = False

    def _note_versions(self, indices: set[int]) -> None:
        for index in indices:
            self._versions[index] = self._now(index)._version


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


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
